"""Metrics for Prometheus, made from the `stats` of connections and listeners.

Needs the package prometheus_client: `pip install aiordma[prometheus]`.
"""

from aiordma.prometheus.collector import StatsCollector

__all__ = ["StatsCollector"]
