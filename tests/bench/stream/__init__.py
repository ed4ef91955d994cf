"""Long streams of corrections: whether all of them hold, what they reach, and what each costs.

Two streams take the same corrections in one drawn order: 3,000 with trained values, and 10,000 with keys only. The
corrections are all rows of zsRE, KnowEdit, the biographies and CounterFact, one for each distinct prompt. Each stream
has an engine of its own, the queries of the sentence encoder, and 512 questions of NQ as traffic. The rows after a
number stand for the stream at that place; so `trained, 1,000` is after 1,000 corrections.

The floor. A correction costs one pass of the model over prompt and target, and one of the encoder over the prompt.
Its own radius costs two passes of the encoder over 25 templates. A trained value costs a forward and a backward pass of
the layers from the edited one on for each step, and more for its forms. An entry is a key and a value in float32, which
is the baseline of `delta`. An undo reads every record once, which is the baseline of its `seconds`.

`keys`: the editor's engine decides on each correction with a value that is given, as in a replay. The value is the
output that the layer has anyway. So queries, radii, wordings, the guard, the deltas and their check are those of an
editor, and so is the pass that examines a correction. Not real: no value is trained or rejected, the model does not
answer with the targets, and no entry takes on a correction of its own label, since its value would not serve there.
So there are at least as many entries as trained values would give.

`corrections`:

- `made`, `rejected`, `unchanged`: corrections by outcome; `unchanged` were right already. `entries`: those stored.
- `ES`: the share of all corrections that are right at once after they are made. A rejected one counts as failed.
- `at once`: the same share of those that were not rejected, which `ERR` is held against.
- `ERR`: the share of those that are served now: by an entry of the target's label, or by none where none is needed.
- `ERR, answered`: of 300 of them, drawn, the share that the edited model answers with the target, token by token.

`right` means the model's answer for `trained`, and the entry that serves the prompt for `keys`.

`cases`, of corrections that an entry serves, at most 500 of a kind; none has a corrected prompt:

- `captured`: an entry serves the case. `own`: that entry serves its correction. `elsewhere`: another one does.
- `correct`: of 100 paraphrases, the share that the edited model answers with the target, token by token.
- `CounterFact neighbour`: the data's neighbour; where it names the subject of another correction, it may ask for what
  that one changes, and is a kind of its own (`corrected subject`). `other relation`: KnowEdit's, without restatements.
  `unrelated`: questions of NQ that are not among the traffic.

`cost`, means over the last 100 corrections: `seconds` is all of it, `examine` the pass of the model, `radius` the
templates, `edit` the rest. On a CPU they are CPU seconds. With trained values `edit` has the pass and the training.
`lookup`: for one prompt in a batch of 16 whose queries are known. `memory`: of the process, with the model and the
prompts' queries.

`undo`: each correction is of one of two authors, drawn; what the first one sent is undone at once. `equal` is 1 where
all entries (keys, values, radii, labels, wordings) are then equal, bit for bit, to those of an engine that never had
these corrections. That engine takes queries, values and sight of traffic from the log, as the undo does.
`decided again`: corrections that rested on what was undone. The seconds are those of a wall clock.

A run that was ended, by whatever, goes on from where it was. The corrections and their deltas are kept in the folder
`bench` under `GRACESTREAM_CACHE_DIR`. The folder's name is a digest of the model, the settings, the data and the code
that decides, so other ones begin anew. `--only` takes one stream; `--quick` takes 50 and 200 corrections.
"""

from tests.bench.stream.report import run

__all__ = ["run"]
