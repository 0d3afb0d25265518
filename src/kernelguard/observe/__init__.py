"""What is on this machine, or on that one?"""
