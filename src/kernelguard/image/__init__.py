"""From a lock to an image whose kernels were verified inside it, and that says so."""
