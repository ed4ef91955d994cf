"""The editor worker: an editor, from settings."""

import structlog
from kafka.errors import KafkaError

from gracestream.pipeline.auth import Admission
from gracestream.pipeline.device import DeviceFault
from gracestream.pipeline.editing import EditEngine, environment
from gracestream.pipeline.editor import (
    STAY_SECONDS,
    Editor,
    EditorLog,
    EditorServices,
    Intake,
    Projection,
    RequestTail,
    SnapshotWriter,
    admission_from_settings,
)
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.history import KafkaHistory
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.stores import RadiusStore, StaleError, redis_client
from gracestream.workers.bootstrap import Worker, plan_of, worker

log = structlog.get_logger()


def run(settings: Settings) -> int:
    """Run the editor until it is told to stop, or another one takes over; the exit status."""
    admission = admission_from_settings(
        settings
    )  # a list of authors that cannot be read is told before a model is loaded
    with worker("editor", settings) as started:
        try:
            build_editor(started, settings, admission).run(started.stop)
        except (HistoryError, DeviceFault, StaleError, KafkaError) as error:
            started.health.not_ready(str(error))
            log.error("editor_stopped", reason=str(error) or type(error).__name__)  # noqa: TRY400  (no defect)
            return 1
        return 0


def build_editor(started: Worker, settings: Settings, admission: Admission) -> "Editor":
    """The editor of a started worker, on the Kafka and the Redis that the settings name."""
    plan = plan_of(settings, reads_text=started.model.reads_text)
    engine, editor_log = EditEngine(started.model, settings.codebook, plan), EditorLog(settings)

    def at_work() -> None:
        started.health.at_work("editor")
        editor_log.stay(STAY_SECONDS)

    traffic, history = RequestTail(settings, engine), KafkaHistory(settings)
    services = EditorServices(
        engine=engine,
        log=editor_log,
        intake=Intake(engine, admission, history, settings.max_record_bytes, traffic.see, at_work),
        traffic=traffic,
        projection=Projection(RadiusStore(redis_client(settings), settings), engine.codebook, settings.redis_grace),
        snapshots=SnapshotWriter(settings),
        environment={"editor": started.name, **environment(started.model, engine.plan)},
    )
    return Editor(services, started.health, settings.edit_batch, started.idle)
