"""Ask a model, correct its answer, and read the corrected answer back.

GRACESTREAM_KAFKA names the cluster, as `gracestream up` prints it:

    GRACESTREAM_KAFKA=127.0.0.1:9092 .venv/bin/python examples/client.py
"""

import sys
import uuid

from gracestream import Client, Feedback, Outcome, Request, load_settings

TIMEOUT = 120.0
"""Seconds to wait for a reply."""


def ask(client: Client, inputs: str, min_seq: int = 0) -> str:
    """The answer to one prompt, from a replica that has applied delta `min_seq`."""
    request = Request(v=1, request_id=str(uuid.uuid4()), inputs=inputs, min_seq=min_seq)
    with client.predictions() as replies:  # open it before sending: it reads only replies that arrive from now on
        client.send([request])
        prediction = replies.wait([request.request_id], TIMEOUT)[request.request_id]
    return str(prediction.outputs.text if prediction.outputs else prediction.error)


def correct(client: Client, inputs: str, target: str) -> Outcome:
    """The outcome of one correction."""
    feedback = Feedback(v=1, feedback_id=str(uuid.uuid4()), inputs=inputs, target=target)
    with client.outcomes() as replies:
        client.send([feedback])
        return replies.wait([feedback.feedback_id], TIMEOUT)[feedback.feedback_id]


def main(inputs: str, target: str) -> None:
    """Print the answer before, the outcome, and the answer after."""
    client = Client(load_settings())
    try:
        print("before:", ask(client, inputs))
        outcome = correct(client, inputs, target)
        print("outcome:", outcome.status, "as delta", outcome.seq, outcome.reason or "")
        print("after: ", ask(client, inputs, min_seq=outcome.seq or 0))
    finally:
        client.close()


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["The capital of Mongolia is", "Ulaanbaatar"]))
