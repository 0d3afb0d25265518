"""What does all that mean?"""
