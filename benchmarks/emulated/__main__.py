"""Start a script on an emulated cluster, as torchrun would start it on a real one.

python -m benchmarks.emulated --nodes 4 --ranks-per-node 4 --nics-per-node 2 --nic 25MB/s -- script.py args
"""

import argparse
import sys

from benchmarks.emulated.cluster import EmulatedCluster
from benchmarks.emulated.processes import RankFailed, RunTimeout
from benchmarks.emulated.rate import format_rate

_TIMED_OUT = 124  # as timeout(1)
_INTERRUPTED = 130  # as a shell after Ctrl-C


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code: that of the first rank that failed, 124 after --timeout, 2 for bad
    input, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.emulated",
        description="Run a script once per rank on an emulated cluster on this machine, with slow network cards.",
        epilog="Everything after -- is handed to Python: a script and its arguments, or -m and a module.",
    )
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the cluster (default 1)")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="processes on each node (default 1)")
    parser.add_argument("--nics-per-node", type=int, default=1, help="network cards of each node (default 1)")
    parser.add_argument("--nic", metavar="RATE", help="rate of each card in each direction: 25MB/s, 200Mbit/s, 1GB/s")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="stop the run after this long")
    parser.add_argument("--log-dir", metavar="DIR", help="write each rank's output to a file in DIR, not to the screen")
    parser.add_argument("command", nargs="+", metavar="script", help="script and arguments, after --")
    options = parser.parse_args(arguments)
    try:
        cluster = EmulatedCluster(
            options.nodes, options.ranks_per_node, nics_per_node=options.nics_per_node, nic=options.nic
        )
        return _run(cluster, options)
    except (ValueError, OSError) as error:
        return _say(str(error), 2)
    except RankFailed as error:
        if options.log_dir:
            print("\n".join(error.tail), file=sys.stderr)
        return _say(f"{error}" + (f"; its output is in {options.log_dir}" if options.log_dir else ""), error.exit_code)
    except RunTimeout as error:
        return _say(str(error), _TIMED_OUT)
    except KeyboardInterrupt:
        return _say("interrupted; all ranks were stopped", _INTERRUPTED)


def _run(cluster: EmulatedCluster, options: argparse.Namespace) -> int:
    width = len(str(cluster.ranks - 1))
    show = None if options.log_dir else lambda rank, line: print(f"[rank {rank:>{width}}] {line}", flush=True)
    with cluster:
        if cluster.shaped:
            assert cluster.rate is not None
            nics = "1 NIC" if cluster.nics_per_node == 1 else f"{cluster.nics_per_node} NICs"
            _say(
                f"{cluster.nodes} nodes x {cluster.ranks_per_node} ranks, {nics} of {format_rate(cluster.rate)} a node"
            )
        else:
            _say(f"the network is not shaped ({cluster.not_shaped_because}); ranks talk over plain loopback")
        script, *arguments = options.command
        cluster.run(script, arguments, timeout=options.timeout, on_line=show, log_dir=options.log_dir)
    return 0


def _say(text: str, code: int = 0) -> int:
    print(f"emulated: {text}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
