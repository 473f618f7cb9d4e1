"""An emulated cluster: real messages over slowed links and timed waits for compute, on one machine.

Real processes run the real schedules, collectives and balancers over gloo. Only the hardware is emulated: network cards
by veth links with a token-bucket limit (`network`), GPUs by timed waits (`paced`). Both are slowed down by the same
factor, so that many ranks fit on a few cores.

    python -m benchmarks.emulated --nodes 4 --ranks-per-node 4 --nics-per-node 2 --nic 25MB/s -- script.py args
"""

from benchmarks.emulated.cluster import EmulatedCluster, Run
from benchmarks.emulated.processes import RankFailed, RunTimeout
from benchmarks.emulated.rate import parse_rate

__all__ = ["EmulatedCluster", "RankFailed", "Run", "RunTimeout", "parse_rate"]
