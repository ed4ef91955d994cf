"""Scope of a correction: prompts that it should change, and prompts that it must not change.

Each stream of corrections has an engine and a codebook of its own, with 512 questions of Natural Questions (NQ) as
traffic. All cases are sent at the end of the stream. Answers are generated in full, up to 16 tokens, as in a replica:
if an entry serves a prompt but its answer is not the target, the unedited model answers. Chats are tokenised like chat
requests. A number in brackets is the 95 % interval of Wilson, a number in parentheses a goal.

**Columns of each kind of case**

- `cases`: the number of cases. `captured`: the share within an entry's radius.
- `answered`: the share of answers that equal the edit's target or begin with it, as words. A negative counts only if it
  is captured.
- `correct`: positives: the answer is the target, to the letter. Negatives: it is the unedited model's answer.
- `near_miss`: captured, but the unedited model answered, because the entry did not give its target.
- `broken`: captured, and the answer is none of these, to the letter: the unedited model's answer, the edit's target,
  the serving entry's target. `repeats`: broken answers that repeat a word or a group of letters.
- `elsewhere`: captured by an entry of another edit.

**Columns of `corrections`**

- `made`, `rejected`, `entries`: counts. `seconds`: mean seconds per trained value.
- `same`: of 16 uncaptured prompts, the share with the unedited model's answer, to the letter.
- `agrees`: the share of cases with the same result in the curve and in the engine, at the engine's own radius.

**Positives**

- `itself`: the corrected prompt. `paraphrase`: the data's other wording.
- `alias`: the same question with another name of the subject. Only 21 of the data's 123 aliased questions ask the same.
- Rules make the other forms from the corrected prompt. `upper` and `lower`: other case. `space` and `newline`: added at
  the end. `punctuation`: without the last mark. `typo`: two letters swapped. `instruction` and `context`: text before
  it. `question` and `statement`: the other type of sentence. `chat`: the question as a user's turn in the model's chat
  template.
- `surface form`: the first six of these forms together.

**Negatives**

- `relation`: a question about another relation of the subject. `restatement`: those of them with the relation that the
  edit's question asks for (82 of 600 rows, labelled by hand). `relation (all)`: both together.
- `subject`: the same question about another subject. `neighbour`: CounterFact's neighbours of edited rows.
- `unrelated`: questions of NQ that are not traffic.
- `pair`: 200 pairs of similar prompts with different answers, written for this benchmark. The other kinds are parts of
  `pair`, named for the difference.

**`intents`**: the demo's classifier is corrected on utterances of Banking77. Seven of its intents get another label. An
`utterance` has the intent of an edit and another text. An `other intent` has none of the seven.

**`curve`**: the share captured as a function of the threshold. A threshold is a radius, in units of the median distance
between nearest neighbours of the traffic. With `held`, no radius exceeds 0.8 of the distance to the traffic. The
nearest key decides.

**Methods**

- `default`: the defaults of all settings. A sentence encoder makes the queries of a generator.
- `layer`: queries of the layer (`GRACESTREAM_QUERY_SOURCE=last`).
- `alpha .1`: a larger share of other requests may be within a radius.
- `asked before`: users sent every case of an edit before the corrections, paraphrases and negatives, as traffic.
- `distance`: without values trained on forms, comparison of words, and radii per correction. Only these methods have
  curves.

A classifier always has the layer's queries.

**Rows of data**: the held-out rows are the first 200 of zsRE and CounterFact, and every second row of the others.
`--development` uses the other rows, on which settings may be chosen. `--only` measures one stream.
"""

from tests.bench.scope.plot import draw
from tests.bench.scope.report import run

__all__ = ["draw", "run"]
