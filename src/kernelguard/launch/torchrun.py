"""On this machine, or on each of several by hand: torchrun, started here."""

from __future__ import annotations

from kernelguard.errors import InputError
from kernelguard.launch.job import Job, Submission, Word, node_command, take

_OPTIONS = ("node-rank", "master-addr", "master-port")


class Torchrun:
    """`--on torchrun`."""

    name = "torchrun"
    program = ""
    shares_disk = True
    needs_image = False

    def render(self, job: Job) -> Submission:
        """The command of this node."""
        options = take(job.options, _OPTIONS, engine=self.name)
        node, port = options.get("node-rank", "0"), options.get("master-port", "")
        if not node.isdecimal() or int(node) >= job.nodes:
            raise InputError(f"node-rank is {node!r}, there are {job.nodes} nodes", hint="they are counted from 0")
        if port and not (port.isdecimal() and 0 < int(port) < 65536):
            raise InputError(f"master-port is {port!r}", hint="a free TCP port of the first node")
        if job.nodes > 1 and not (port and options.get("master-addr")):
            raise InputError(
                f"{job.nodes} nodes have to know where the first one is",
                hint="-o master-addr=HOST -o master-port=29500 -o node-rank=N, the same on every node but for N",
            )
        words: list[Word] = node_command(
            job,
            site=f"{job.run_dir}/site",
            ticket=f"{job.run_dir}/ticket.json",
            node=node,
            address=options.get("master-addr", ""),
            port=port,
        )
        return Submission(files=(), argv=tuple(str(word) for word in words), runs_here=True)
