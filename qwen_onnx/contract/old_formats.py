"""Manifests of earlier versions, as this one writes them."""

from __future__ import annotations

from typing import Any

from qwen_onnx.contract.cache_spec import CacheSpec
from qwen_onnx.contract.json_file import from_json


def from_format_2(raw: dict[str, Any]) -> dict[str, Any]:
    """An export.json of format 2 as one of format 3, which lists state tensors by themselves."""
    caches: dict[str, dict[str, Any]] = {}
    graphs = []
    for graph in raw["graphs"]:
        states = []
        for spec in graph["inputs"]:
            if spec["name"].startswith("past_key_values."):
                _, layer, name = spec["name"].split(".")
                state = {"layer": int(layer), "name": name, "kind": "full_attention"}
                states.append({**state, "dtype": spec["dtype"], "shape": spec["shape"]})
        if states and graph["entry"] not in ("grow", "shrink"):
            cache = {"states": states}
            name = from_json(CacheSpec, cache).name
            caches[name] = cache
            graph = {**graph, "cache": name}
        graphs.append(graph)
    layout = "plain" if raw.get("layout") == "cpu" else raw.get("layout", "plain")
    changed = {"format_version": 3, "graphs": graphs, "caches": caches, "layout": layout}
    return {**raw, **changed, "quantized": raw["quantised"]}
