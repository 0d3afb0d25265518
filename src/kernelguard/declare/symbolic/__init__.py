"""What would this model's code build and call, for this configuration? Followed without running it."""
