"""GET /metrics: the engine's counters and what clients saw, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from api.service import Service, why_not


class Metrics(Collector):
    """One app's numbers: the engine's, read when asked, and the histograms of what clients saw."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.first_token = self._histogram("time_to_first_token", "From request to first token", 0.01)
        self.gap = self._histogram("inter_token", "Between two tokens of a choice", 0.001)
        self.request = self._histogram("request", "Whole generations", 0.05)

    def _histogram(self, name: str, what: str, start: float) -> Histogram:
        buckets = [start * 2**i for i in range(14)]
        return Histogram(f"torchchat_{name}_seconds", f"{what}, in seconds.", buckets=buckets, registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        """The engine's counters and gauges (prometheus_client calls this at each scrape)."""
        service = self._service
        yield InfoMetricFamily("torchchat_build", "What runs here.", value=dict(service.info))
        up = why_not(service) is None or (service.state == "draining" and service.engine.alive)
        yield GaugeMetricFamily("torchchat_engine_up", "1 when a generation would run.", value=float(up))
        if service.state not in ("ready", "draining"):
            return
        stats = service.engine.stats()
        yield GaugeMetricFamily("torchchat_requests_running", "Requests that hold a row.", value=stats.running)
        yield GaugeMetricFamily("torchchat_requests_waiting", "Requests that wait for a row.", value=stats.waiting)
        yield GaugeMetricFamily("torchchat_rows", "Rows of the batch.", value=stats.rows)
        requests = CounterMetricFamily("torchchat_requests", "Finished requests.", labels=["finish_reason"])
        for reason, count in stats.requests.items():
            requests.add_metric([reason], count)
        yield requests
        yield CounterMetricFamily("torchchat_prompt_tokens", "Tokens of prompts.", value=stats.prompt_tokens)
        yield CounterMetricFamily("torchchat_cached_tokens", "Prompt tokens reused.", value=stats.cached_tokens)
        yield CounterMetricFamily("torchchat_generation_tokens", "Tokens sampled.", value=stats.generation_tokens)
