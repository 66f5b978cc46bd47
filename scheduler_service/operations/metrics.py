"""Exports state and statistics as Prometheus metrics.

Metrics that vLLM has keep its meaning and name, with the prefix `pagewire_` for `vllm:`. `vllm_names` exports them
under vLLM's names too, for dashboards and Kubernetes' gateways.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pagewire.v1 import admin_service_pb2 as pb
from scheduler_service.engine.adapters.adapter_counts import MAX_COUNTED
from scheduler_service.engine.engine import Engine
from scheduler_service.engine.front_ends.servicer import FrontEnds
from scheduler_service.operations.cluster_state import cluster_state
from scheduler_service.statistics.counts import CountsByTenant, Histogram, RequestCounts

PHASES = ("schedule", "encode", "wire", "move", "images", "forward", "sample", "guess", "decode", "update", "publish")
STATUSES = [name.removeprefix("WORKER_STATUS_").lower() for name, number in pb.WorkerStatus.items() if number]
VLLM = "vllm:"
REASONS = ("stop", "length", "abort", "error")


class SchedulerMetrics:
    """Metric families of a scrape, on the engine's event loop. Counts are sums over all front ends."""

    def __init__(self, front_ends: FrontEnds, model_name: Callable[[], str], *, vllm_names: bool) -> None:
        self._front_ends = front_ends
        self._model_name = model_name
        self._vllm_names = vllm_names

    async def families(self) -> list[Metric]:
        counts = await self._front_ends.counts()
        state = cluster_state(self._front_ends)
        total = counts.total
        by_tenant = [({"tenant": name}, of) for name, of in counts.tenants.items()] or [({"tenant": ""}, total)]
        families = [*self._like_vllm("pagewire_", "worker", state, total, {}, by_tenant)]
        if self._vllm_names:
            families += self._like_vllm(VLLM, "engine", state, total, {"engine": "0"}, [({}, total)])
        return [*families, *self._own(state, counts)]

    def _like_vllm(
        self,
        prefix: str,
        worker_label: str,
        state: pb.ClusterState,
        counts: RequestCounts,
        labels: Mapping[str, str],
        histograms: Sequence[tuple[dict[str, str], RequestCounts]],
    ) -> Iterator[Metric]:
        family = _Families(prefix, {"model_name": self._model_name(), **labels})
        num_running = sum(worker.num_running for worker in state.workers)
        num_swapped = sum(worker.num_swapped for worker in state.workers)
        yield family.gauge("num_requests_running", "Requests that workers are computing.", num_running)
        yield family.gauge("num_requests_waiting", "Requests that wait for a worker.", state.num_waiting)
        yield family.gauge("num_requests_swapped", "Requests swapped out to workers' host memory.", num_swapped)
        yield family.gauges(
            "kv_cache_usage_perc",
            "Share of a worker's device blocks that sequences hold, in [0, 1].",
            worker_label,
            {
                worker.address: 1 - worker.num_free_device_blocks / worker.num_device_blocks
                for worker in state.workers
                if worker.num_device_blocks
            },
        )
        for name, text, count in (
            ("num_preemptions", "Preemptions of requests.", state.num_preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", state.num_prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", state.num_cached_tokens),
            ("prompt_tokens", "Prompt tokens of requests that workers received.", state.num_prompt_tokens),
            ("generation_tokens", "Tokens generated.", state.num_output_tokens),
        ):
            yield family.counter(name, text, count)
        # By worker, so without workers that have left.
        for name, text, field in (
            ("spec_decode_num_draft_tokens", "Drafts that were verified.", "num_guessed_tokens"),
            ("spec_decode_num_accepted_tokens", "Drafts that were accepted.", "num_accepted_tokens"),
            (
                "mm_cache_queries",
                "Times that a sequence began to need an image.",
                "num_encoder_queries",
            ),
            ("mm_cache_hits", "Images of these that the worker did not encode for the sequence.", "num_encoder_hits"),
        ):
            yield family.counters(name, text, worker_label, {w.address: getattr(w, field) for w in state.workers})
        yield family.counters(
            "spec_decode_num_drafts",
            "Sequences with verified drafts, summed over steps.",
            worker_label,
            {w.address: next(iter(w.num_guessed_by_position), 0) for w in state.workers},
        )
        yield family.table(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafts by position, from 0.",
            (worker_label, "position"),
            {
                (worker.address, str(position)): number
                for worker in state.workers
                for position, number in enumerate(worker.num_accepted_by_position)
            },
        )
        yield family.counters(
            "request_success",
            "Outputs that ended, by reason.",
            "finished_reason",
            {reason: counts.num_outputs[reason] for reason in REASONS},
        )
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", "first_token_seconds"),
            ("inter_token_latency_seconds", "Between two tokens of an output.", "token_seconds"),
            ("e2e_request_latency_seconds", "From arrival to the end of the last output.", "request_seconds"),
            ("request_queue_time_seconds", "From arrival to a worker.", "queue_seconds"),
            ("request_prompt_tokens", "Tokens of a request's prompt.", "prompt_tokens"),
            ("request_generation_tokens", "Tokens of an output.", "output_tokens"),
            ("request_prefill_time_seconds", "From the first worker to the first token.", "prefill_seconds"),
            ("request_decode_time_seconds", "From the first token to the last one.", "decode_seconds"),
            ("request_inference_time_seconds", "From the first worker to the last token.", "inference_seconds"),
            ("request_time_per_output_token_seconds", "Mean time between a request's tokens.", "mean_token_seconds"),
            ("request_params_n", "Outputs that a request asked for.", "params_n"),
            ("request_params_max_tokens", "Maximum tokens of an output.", "params_max_tokens"),
        ):
            yield family.histogram(name, text, [(more, getattr(of, histogram)) for more, of in histograms])
        workers = self._front_ends.engine.workers.all
        # The suffix `_total` is for counters, so vLLM's name loses it under `pagewire_`.
        yield family.histogram(
            "iteration_tokens_total" if prefix == VLLM else "iteration_tokens",
            "Tokens that a step computes.",
            [({worker_label: worker.client.address}, worker.step_tokens) for worker in workers],
        )
        yield family.info(
            "cache_config_info",
            "Size and number of a worker's KV blocks; always 1.",
            [
                {
                    worker_label: worker.client.address,
                    "block_size": str(worker.scheduler.blocks.block_size),
                    "num_gpu_blocks": str(worker.scheduler.blocks.device.num_blocks),
                }
                for worker in workers
                if worker.scheduler is not None
            ],
        )
        if self._front_ends.engine.adapters.catalogue.are_served:
            yield _adapters_in_use(prefix, self._front_ends.engine)

    def _own(self, state: pb.ClusterState, counts: CountsByTenant) -> Iterator[Metric]:
        family = _Families("pagewire_", {"model_name": self._model_name()})
        num_serving = sum(worker.status == pb.WORKER_STATUS_SERVING for worker in state.workers)
        statuses = Counter(_status(worker) for worker in state.workers)
        yield family.gauge(
            "queued_requests_per_worker",
            "Waiting requests for each worker that accepts requests: the metric for scaling workers.",
            state.num_waiting / max(1, num_serving),
        )
        yield family.gauges(
            "workers",
            "Workers by status.",
            "status",
            {status: statuses[status] for status in STATUSES},
        )
        yield family.gauge("draining", "1 while the scheduler is shutting down.", state.draining)
        yield family.counter("worker_losses", "Broken sessions with workers.", state.num_losses)
        for name, text, gauges in (
            ("worker_requests_running", "Requests that a worker is computing.", "num_running"),
            ("worker_requests_swapped", "Requests swapped out to a worker's host memory.", "num_swapped"),
        ):
            yield family.gauges(name, text, "worker", {w.address: getattr(w, gauges) for w in state.workers})
        for name, text, blocks in (
            ("layer_group_blocks_held", "Device blocks that running sequences hold.", "num_held_blocks"),
            ("layer_group_blocks_cached", "Device blocks that only the prefix cache keeps.", "num_cached_blocks"),
        ):
            yield family.table(
                name,
                text,
                ("worker", "group", "kind"),
                {
                    (worker.address, str(number), group.kind): getattr(group, blocks)
                    for worker in state.workers
                    for number, group in enumerate(worker.layer_groups)
                },
                GaugeMetricFamily,
            )
        yield family.info(
            "spec_decode_info",
            "Proposer of a worker's drafts; always 1.",
            [{"worker": w.address, "proposer": w.proposer} for w in state.workers if w.proposer],
        )
        yield family.counters(
            "steps", "Steps that a worker has answered.", "worker", {w.address: w.num_steps for w in state.workers}
        )
        yield family.counters(
            "encoded_image_tokens",
            "Tokens of the images that a worker has encoded.",
            "worker",
            {w.address: w.num_encoded_tokens for w in state.workers},
        )
        yield family.table(
            "step_phase_seconds",
            "Time of a worker's steps by phase; phases of steps in flight overlap.",
            ("worker", "phase"),
            {
                (worker.address, phase): getattr(worker.step_split, f"{phase}_us") / 1e6
                for worker in state.workers
                for phase in PHASES
            },
        )
        for metric, text, count in (
            ("tenant_requests", "Finished requests of a tenant.", "num_requests"),
            ("tenant_prompt_tokens", "Prompt tokens of these requests.", "num_prompt_tokens"),
            ("tenant_generation_tokens", "Output tokens of these requests.", "num_output_tokens"),
        ):
            yield family.counters(
                metric, text, "tenant", {name: getattr(of, count) for name, of in counts.tenants.items()}
            )
        adapters = self._front_ends.engine.adapters.counts
        for metric, text, numbers in (
            ("adapter_requests", "Finished requests of an adapter.", adapters.num_requests),
            ("adapter_prompt_tokens", "Prompt tokens of these requests.", adapters.num_prompt_tokens),
            ("adapter_generation_tokens", "Output tokens of these requests.", adapters.num_output_tokens),
        ):
            yield family.counters(metric, text, "adapter", numbers)
        fetches = {worker.client.address: worker.fetch_counts for worker in self._front_ends.engine.workers.all}
        for metric, text, count in (
            ("adapter_fetches", "Adapters sent to a worker.", "num_adapters"),
            ("adapter_fetch_bytes", "Bytes of the adapters' weights.", "num_bytes"),
            ("adapter_fetch_seconds", "Seconds of sending adapters.", "seconds"),
        ):
            yield family.counters(metric, text, "worker", {name: getattr(of, count) for name, of in fetches.items()})
        placement = state.placement
        yield family.counters("placements", "Requests that a worker took, by reason.", "reason", placement.placed)
        yield family.counters(
            "placements_left", "Requests left to another worker, by reason.", "reason", placement.left
        )
        yield family.counter("placement_overtakes", "Requests taken before an earlier one.", placement.num_overtakes)
        yield family.counter("placement_moves", "Swapped requests moved to another worker.", placement.num_moved)


def _adapters_in_use(prefix: str, engine: Engine) -> Metric:
    """Adapters in use, for Kubernetes' gateways: the labels are the data, the value is their time."""
    waiting: Counter[str] = Counter()
    running: Counter[str] = Counter()
    for call in engine.requests.in_flight.values():
        if name := (call.parent or call).adapter_name:
            (waiting if call.key in engine.requests.waiting else running)[name] += 1
    most = sum(worker.scheduler.config.max_loras for worker in engine.workers.all if worker.scheduler is not None)
    labels = {
        "max_lora": str(most),
        "running_lora_adapters": _most_used(running),
        "waiting_lora_adapters": _most_used(waiting),
    }
    text = "Adapters that running and waiting requests name, and how many workers compute at a time."
    family = GaugeMetricFamily(f"{prefix}lora_requests_info", text, labels=list(labels))
    family.add_metric(list(labels.values()), time.time())
    return family


def _most_used(adapters: Counter[str]) -> str:
    return ",".join(sorted(name for name, _ in adapters.most_common(MAX_COUNTED)))


def _status(worker: pb.WorkerState) -> str:
    return pb.WorkerStatus.Name(worker.status).removeprefix("WORKER_STATUS_").lower()


class _Families:
    """Metric families with one prefix and common labels."""

    def __init__(self, prefix: str, labels: dict[str, str]) -> None:
        self._prefix = prefix
        self._labels = labels

    def gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(self._prefix + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def gauges(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, text, labels=self._with(label))
        for key, value in values.items():
            family.add_metric(list({**self._labels, label: key}.values()), value)
        return family

    def counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        return self.table(name, text, (label,), {(key,): value for key, value in values.items()})

    def table(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        values: Mapping[tuple[str, ...], float],
        kind: type[CounterMetricFamily | GaugeMetricFamily] = CounterMetricFamily,
    ) -> Metric:
        """Counters or gauges by the values of all `labels`."""
        family = kind(self._prefix + name, text, labels=[*self._labels, *labels])
        for keys, value in values.items():
            family.add_metric([*self._labels.values(), *keys], value)
        return family

    def histogram(self, name: str, text: str, histograms: Sequence[tuple[dict[str, str], Histogram]]) -> Metric:
        """A histogram for each set of further labels, all with the same names."""
        labels = [self._labels | more for more, _ in histograms]
        family = HistogramMetricFamily(self._prefix + name, text, labels=list(labels[0]) if labels else ())
        for all_of, (_, histogram) in zip(labels, histograms, strict=True):
            bounds = [*map(str, histogram.bounds), "+Inf"]
            buckets = [*zip(bounds, accumulate(histogram.counts), strict=True)]
            family.add_metric(list(all_of.values()), buckets, histogram.total)
        return family

    def info(self, name: str, text: str, entries: Sequence[dict[str, str]]) -> Metric:
        """A gauge of value 1 for each set of further labels, all with the same names."""
        labels = [self._labels | entry for entry in entries]
        family = GaugeMetricFamily(self._prefix + name, text, labels=list(labels[0]) if labels else ())
        for all_of in labels:
            family.add_metric(list(all_of.values()), 1)
        return family

    def _with(self, label: str) -> list[str]:
        return list({**self._labels, label: ""})
