"""What a person reads: terminal, JSON, JUnit."""
