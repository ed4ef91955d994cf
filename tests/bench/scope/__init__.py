"""What a correction reaches: cases that it should change, and cases that it must leave alone.

Every stream of corrections has an engine and a codebook of its own, with 512 questions of NQ as traffic. All cases are
asked at the end of the stream. Answers are generated whole, at most 16 tokens, as a replica gives them: where an entry
serves a prompt and the answer is not its target, the unedited model answers. Chats are tokenised as a request's are.

- `cases`: their number. `captured`: the share that lies within an entry's radius.
- `answered`: the whole answer equals the target of the edit or begins with it, as words; negatives count if captured.
- `correct`: positives answer with the target, to the letter; negatives with the unedited model's answer.
- `near_miss`: captured, and answered by the unedited model since the entry did not give its target.
- `broken`: captured, and the answer is neither the unedited model's nor the target of the edit or of the serving entry,
  to the letter. `repeats`: broken answers that repeat a word or a group of letters.
- `elsewhere`: captured by an entry of another edit.

In brackets stands the 95 % interval of Wilson; in parentheses a goal.

`corrections`: their number, those rejected, the entries, and seconds for each trained value. `same`: the share of 16
uncaptured prompts with the unedited model's answer, to the letter. `agrees`: the share of cases in which the curve and
the engine say the same at the engine's own radius.

Positives. `itself`: the corrected prompt. `paraphrase`: the data's other wording. `alias`: the same question under
another name of the subject; only 21 of the data's 123 aliased questions do ask the same. The other forms are made by
rules from the corrected prompt: `upper`, `lower`, `space` and `newline` at the end, `punctuation` without its last
mark, `typo` (two letters swapped), `instruction` and `context` before it, `question`, `statement`, and `chat`: the
model's own template with the question as the user's turn. `surface form` is the first six together.

Negatives. `relation`: another relation of the subject; `restatement`: those of them whose relation the edit's question
asks for (82 of 600 rows, labelled by hand); `relation (all)`: both together. `subject`: the same question of
another subject. `neighbour`: CounterFact's neighbours of edited rows. The other kinds are written for this benchmark,
200 pairs of similar prompts with another answer, and are named for what differs; `pair` is all of them. `unrelated`:
NQ's questions that are not among the traffic.

`intents`: the demo's classifier corrected on Banking77's utterances, seven of whose intents get another label. An
`utterance` has the intent of an edit and is another text; `other intent` has none of the seven.

`curve`: the share captured over the threshold. A threshold is a radius in medians of the traffic's nearest neighbours,
and with `held` no radius passes 0.8 of the distance to the traffic. The nearest key decides.

Methods: `default` has all settings' defaults, so that a sentence encoder makes a generator's queries; `layer` has the
layer's queries (`GRACESTREAM_QUERY_SOURCE=last`), and `alpha .1` a larger share of other requests within a radius.
`asked before` has traffic in which users asked every case of an edit before the corrections: paraphrases, and what must
not change. `distance` is the method without values trained on forms, the comparison of words, and radii of corrections'
own: of these alone the curves are. A classifier's queries are the layer's in any case.

Where a page has rows of `encoder 0.6` and `encoder 0.8`, all of its rows are older than forms, the comparison of words,
radii of corrections' own and the check of answers. `encoder 0.6` is there what `default, distance` is now, and `layer`
what `layer, distance` is.

Held-out rows: of zsRE and CounterFact the first 200, of the others every second row. `--development` takes the other
rows, on which settings may be chosen. `--only` takes one stream.
"""

from tests.bench.scope.plot import draw
from tests.bench.scope.report import run

__all__ = ["draw", "run"]
