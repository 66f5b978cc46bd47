"""Nothing waits, expires or is limited by the time of day, which a machine's clock may change at any moment."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHOWN = {
    "pagewire_client/cli/finished.py": "shows when requests ended",
    "pagewire_client/cli/watch.py": "shows when a state was read",
    "scheduler_service/engine/sessions/worker_loop.py": "an epoch, newer than the last one whatever the clock says",
    "scheduler_service/frontend/http/resuming/event_ids.py": "`created` of an answer",
    "scheduler_service/frontend/http/served/models.py": "`created` of a model",
    "scheduler_service/frontend/http/vectors/embeddings.py": "`created` of an answer",
    "scheduler_service/frontend/http/vectors/scores.py": "`created` of an answer",
    "scheduler_service/frontend/http/responses/response_object.py": "`created_at` of a response",
    "scheduler_service/frontend/http/ollama/answers.py": "`created_at` of an answer",
    "scheduler_service/frontend/rendering/chat_template.py": "a template's strftime_now",
    "scheduler_service/frontend/output/request_trace.py": "times of spans",
    "scheduler_service/operations/metrics.py": "a gauge's time",
    "scheduler_service/recording/perfetto.py": "shows when a recording began",
    "scheduler_service/recording/recorder.py": "when a recording began",
    "scheduler_service/simulation/trace.py": "times in the file of a trace",
    "scheduler_service/statistics/counts.py": "when the scheduler started, and when a request ended",
    "worker_service/serving/traces.py": "times of spans",
    "pagewire_common/connection/tls.py": "ages of files; if the clock has jumped, a second look at them decides",
}
TIME_OF_DAY = re.compile(r"\btime\.(time|time_ns|localtime|gmtime)\(|\bdatetime\.\w+\(|CLOCK_REALTIME|system_clock")


def test_the_time_of_day_is_read_only_where_it_is_shown() -> None:
    folders = (
        "scheduler_service",
        "worker_service",
        "pagewire_client",
        "pagewire_command",
        "pagewire_common",
        "kernels",
    )
    files = [file for folder in folders for kind in ("*.py", "*.h", "*.cpp") for file in (ROOT / folder).rglob(kind)]
    assert len(files) > 300
    reading = {str(file.relative_to(ROOT)) for file in files if TIME_OF_DAY.search(file.read_text())}
    assert reading == SHOWN.keys()
