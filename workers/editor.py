"""The editor worker: builds an editor from settings and runs it."""

import structlog
from kafka.errors import KafkaError

from gracestream.pipeline.auth import Admission
from gracestream.pipeline.device import DeviceLostError
from gracestream.pipeline.editing import EditEngine, describe_environment
from gracestream.pipeline.editor import (
    KEEP_ALIVE_SECONDS,
    Editor,
    EditorLog,
    EditorServices,
    FeedbackProcessor,
    RedisPublisher,
    SnapshotWriter,
    TrafficReader,
    admission_from_settings,
)
from gracestream.pipeline.errors import HistoryError
from gracestream.pipeline.history import KafkaHistory
from gracestream.pipeline.settings import Settings
from gracestream.pipeline.stores import RedisHeadStore, StaleHeadError, redis_client
from gracestream.workers.bootstrap import WorkerContext, edit_config_from_settings, start_worker

log = structlog.get_logger()


def run(settings: Settings) -> int:
    """Run the editor until it is stopped, another editor leads, or an error ends it; the exit status."""
    # Before the model is loaded, so that an unreadable list of authors is reported at once.
    admission = admission_from_settings(settings.auth, settings.kafka, settings.model.codebook)
    with start_worker("editor", settings) as started:
        try:
            build_editor(started, settings, admission).run(started.stop)
        except (HistoryError, DeviceLostError, StaleHeadError, KafkaError) as error:
            started.health.set_not_ready(str(error))
            log.error(  # noqa: TRY400  (not a defect)
                "editor_stopped",
                reason=str(error) or type(error).__name__,
                consequence="the process exits with status 1; feedback waits for a standby or a restart",
            )
            return 1
        return 0


def build_editor(worker: WorkerContext, settings: Settings, admission: Admission) -> "Editor":
    """The editor of a started worker, on the Kafka and Redis that the settings name."""
    config = edit_config_from_settings(settings.editing, uses_encoder=worker.model.reads_text)
    engine, editor_log = EditEngine(worker.model, settings.model.codebook, config), EditorLog(settings.kafka)

    def heartbeat() -> None:
        worker.health.begin("editor")
        editor_log.keep_alive(KEEP_ALIVE_SECONDS)

    traffic_reader, history = TrafficReader(settings.kafka, engine), KafkaHistory(settings.kafka)
    services = EditorServices(
        engine=engine,
        log=editor_log,
        feedback_processor=FeedbackProcessor(
            engine, admission, history, settings.kafka.max_record_bytes, traffic_reader.catch_up_to_now, heartbeat
        ),
        traffic_reader=traffic_reader,
        redis_publisher=RedisPublisher(
            RedisHeadStore(redis_client(settings.redis), settings.kafka.topic_prefix, engine.codebook.name),
            engine.codebook,
            settings.redis.outage_grace,
        ),
        snapshot_writer=SnapshotWriter(settings.kafka, settings.snapshots),
        environment={"editor": worker.name, **describe_environment(worker.model, engine.config)},
    )
    return Editor(services, worker.health, settings.editing.training_batch_size, worker.idle)
