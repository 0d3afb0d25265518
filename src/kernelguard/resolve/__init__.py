"""Which build of each kernel fits?"""
