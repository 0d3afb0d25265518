"""Forward and backward, against a reference: probes in workers, one process for each kernel -> Verdict."""
