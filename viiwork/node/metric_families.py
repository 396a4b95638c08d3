"""Metric families of plain dicts: label values -> number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from viiwork.core.tally import Histogram


def single(counts: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    """The keys as the values of one label."""
    return {(key,): n for key, n in counts.items()}


def gauge(name: str, text: str, values: Mapping[Any, Any], *labels: str) -> Metric:
    """`values` by label values; `{(): x}` of a family without labels."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def counter(name: str, text: str, values: Mapping[Any, Any], *labels: str) -> Metric:
    """The same; its samples are shown as `name_total`."""
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def histogram(name: str, text: str, values: Mapping[Any, Histogram], *labels: str) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, one in values.items():
        n, buckets = 0, []
        for bound, count in zip((*one.bounds, float("inf")), one.counts, strict=True):
            n += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), n))
        family.add_metric(key, buckets, one.total)
    return family
