"""Every graph is the one that was recorded: a change of graphs/ that is meant to change none is tested by this."""

from __future__ import annotations

import pytest

from support.checkpoints import CONFIGS
from support.graph_digests import digests, golden
from support.marks import but_first

OFTEN = ("qwen2", "qwen2_untied", "qwen3", "qwen3_bias")
"""In every run."""


@pytest.mark.parametrize("name", but_first(sorted(CONFIGS, key=lambda name: name not in OFTEN), len(OFTEN)))
def test_graphs_are_those_recorded(name: str) -> None:
    """Nodes, names, attributes, types, shapes, inputs, outputs, initializers and operator sets are the recorded ones.

    After a change on purpose: `PYTHONPATH=tests python -m support.graph_digests`, and look at the difference.
    """
    recorded = {graph: parts for graph, parts in golden().items() if graph.startswith(f"{name}/")}
    found = digests(name)
    changed = [
        f"{graph}: {', '.join(part for part in found[graph] if found[graph][part] != parts[part])}"
        for graph, parts in recorded.items()
        if graph in found and found[graph] != parts
    ]
    assert not changed, f"{len(changed)} graphs are others now: {'; '.join(changed[:10])}"
    assert found.keys() == recorded.keys()
