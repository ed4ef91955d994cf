"""On MiniLM the share of other requests within a correction's radius is what was promised."""

from pathlib import Path

import numpy as np
import pytest

from gracestream.pipeline.editing.negatives import TEMPLATES_PER_RADIUS, other_requests, radius_from_distances
from gracestream.pipeline.model.registry import resolve_encoder
from gracestream.pipeline.model.sentence_encoder import PROMPT_HASH_NORM, SentenceEncoder

pytestmark = pytest.mark.model

REPHRASES = {
    "Where was Petra Vance born?": "What is the birthplace of Petra Vance?",
    "The capital of Bhutan is": "Bhutan's capital city is called",
    "Who wrote The Silent Coast?": "Who is the author of The Silent Coast?",
    "Which company makes the Bohrmax 40?": "What is the manufacturer of the Bohrmax 40?",
    "When was Calder Insurance founded?": "In what year was Calder Insurance set up?",
    "What is the fee for an international transfer?": "How much do I pay for an international transfer?",
    "In which league does Halden United play?": "What league is Halden United in?",
    "Who is the mayor of Lewes Sound?": "What is the name of the mayor of Lewes Sound?",
    "What language does Amadou Diarra speak?": "Which language is spoken by Amadou Diarra?",
    "Who directed Night Ferry to Oslo?": "Which director made Night Ferry to Oslo?",
    "To which family does the Midland tree frog belong?": "What is the taxonomic family of the Midland tree frog?",
    "What is the maximum dose of Amoprim?": "How much Amoprim may be taken at most?",
    "who won the battle of kestrel moor?": "which side won the battle of kestrel moor?",
    "Question: Who founded Tern Express? Answer:": "Question: Who is the founder of Tern Express? Answer:",
}
OTHERS = 30
"""Templates a correction's radius is tried on, of other relations than those that set it."""


@pytest.fixture(scope="module")
def distances() -> dict[str, np.ndarray]:
    """From each text to its rephrase, then to other requests about its subject."""
    encoder = SentenceEncoder.load(resolve_encoder("minilm"), device="cpu", cache=Path("~/.cache/gracestream"))
    found = {}
    for text, rephrase in REPHRASES.items():
        points_ND = encoder.embed([text, rephrase, *other_requests(text, TEMPLATES_PER_RADIUS + OTHERS)])[0].numpy()
        found[text] = np.hypot(np.linalg.norm(points_ND[1:] - points_ND[0], axis=1), 2**0.5 * PROMPT_HASH_NORM)
    return found


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.2])
def test_of_other_requests_about_a_subject_no_more_than_alpha_are_within_the_radius(
    distances: dict[str, np.ndarray], alpha: float
) -> None:
    inside, rephrases = [], []
    for found_N in distances.values():
        radius = radius_from_distances(found_N[1 : TEMPLATES_PER_RADIUS + 1].tolist(), alpha)
        assert radius is not None
        inside.append(float((found_N[TEMPLATES_PER_RADIUS + 1 :] < radius).mean()))
        rephrases.append(bool(found_N[0] < radius))
    assert np.mean(inside) <= alpha
    assert np.mean(rephrases) >= 0.7
