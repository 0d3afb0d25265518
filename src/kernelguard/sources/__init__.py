"""Where could a kernel come from?"""
