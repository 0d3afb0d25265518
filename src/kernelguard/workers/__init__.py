"""What runs inside the observed interpreter: standard library and the thing under test only."""
