"""Links execution traces with Kineto traces into one graph per rank.

```python
from crossrank.tools.graph.linking import link

trace = link("rank-0.et.json.zst", "rank-0.kineto.json.zst", "rank-0.comms.jsonl.zst")
print(trace.report.host_rate, len(trace.communications), trace.report.edges)
```

Read `linked_trace` (the result), `link` (the order of the work), `event_matching` and `nesting` (which event is which
node, and what runs inside what), `communications`, then `dependencies` and `waits` (the edges).
"""

from crossrank.tools.graph.linking.link import link
from crossrank.tools.graph.linking.linked_trace import (
    EDGE_KINDS,
    Activity,
    Communication,
    Edge,
    EdgeKind,
    HostOp,
    LinkedTrace,
    MatchReport,
)

__all__ = [
    "EDGE_KINDS",
    "Activity",
    "Communication",
    "Edge",
    "EdgeKind",
    "HostOp",
    "LinkedTrace",
    "MatchReport",
    "link",
]
