"""Authors who sign their feedback, the list of authors, and an editor with this list."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gracestream.pipeline.auth.signing import encode_public_key, sign
from gracestream.pipeline.client import SignedFeedback, feedback_to_sign, parse_signed_feedback
from gracestream.pipeline.settings import Settings
from gracestream.schemas.messages import Outcome
from tests.support.forked_commands import Forked
from tests.support.running import TIMEOUT, Users, deltas_in_log
from tests.support.tiny_models import texts

PROMPTS = texts(30, seed=31, shortest=6, longest=9)
ANN, BOB, CARL, STRANGER = (Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(4))


def line(author: str, key: Ed25519PrivateKey, per_minute: int = 0, roles: Sequence[str] | None = None) -> str:
    """An author's entry in the list."""
    more = "" if roles is None else f", roles = {list(roles)}"
    return f'{author} = {{ keys = ["{encode_public_key(key.public_key())}"], per_minute = {per_minute}{more} }}\n'


def signed(author: str, prompt: str, key: Ed25519PrivateKey, codebook: str = "default") -> SignedFeedback:
    """A signed correction by another program, with a field that this one does not know."""
    text = feedback_to_sign({"inputs": prompt, "target": "museum"}, author)
    text = text[:-1] + f',"reviewed":["by","{author}"]}}'.encode()
    return parse_signed_feedback(sign(text, key, codebook))


def signed_as(author: str, key: Ed25519PrivateKey, codebook: str = "default", **fields: Any) -> SignedFeedback:
    """Signed feedback of any kind."""
    return parse_signed_feedback(sign(feedback_to_sign(fields, author), key, codebook))


class Deployment:
    """An editor with a list of authors, and its users."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self.authors = settings, Path(str(settings.auth.authors_file))
        self.users = Users(settings)
        self.editor = Forked("editor", "edit", settings, folder)

    def send(self, *feedback: SignedFeedback) -> list[Outcome]:
        """The outcomes of these records, in their order."""
        with self.users.client.outcomes() as replies:
            self.users.client.send(feedback)
            found = replies.wait([one.feedback_id for one in feedback], TIMEOUT)
        assert len(found) == len(feedback), "feedback got no outcome"
        return list(found.values())

    def deltas(self) -> int:
        """The number of deltas, without `lead` deltas."""
        return sum(delta.op != "lead" for delta in deltas_in_log(self.settings))
