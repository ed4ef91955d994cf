"""Long streams of corrections: how many stay in force, what they reach, and what each costs.

Two streams apply the same corrections in one random order: `trained` applies 3,000 with trained values, `keys` 10,000
with keys only. The corrections are all rows of zsRE, KnowEdit, the biographies and CounterFact, one for each distinct
prompt. Each stream has an engine of its own, queries of the sentence encoder, and 512 questions of NQ (Natural
Questions) as traffic. A row such as `trained, 1,000` describes the stream after 1,000 corrections.

`keys` uses the editor's engine. It gives each decision a value, as in a replay: the unchanged output of the layer. So
queries, radii, wordings, the retention guard, deltas and their checks are those of an editor. So is the pass that
inspects a correction. Three things differ from an editor:

- No value is trained or rejected.
- The model does not answer with the targets.
- No entry takes on a correction with its own label, because its value would not serve there. So there are at least as
  many entries as with trained values.

**Floor (lower bound) of the cost.** A correction costs one pass of the model over prompt and target. It costs one pass
of the encoder over the prompt. Its own radius costs two passes of the encoder over 25 templates. Each training step of
a value costs a forward and a backward pass, through the layers from the edited one on. Forms add to it. An entry is a
key and a value in float32; this is the baseline of `delta`. An undo reads every record once; this is the baseline of
its `seconds`.

**`corrections`.** "Right" means the model's answer for `trained`, and the serving entry for `keys`.

- `made`, `rejected`, `unchanged`: corrections by outcome. `unchanged` ones were right already. `entries`: stored
  entries.
- `ES`: the share of all corrections that are right immediately afterwards. A rejected one counts as failed.
- `at once`: the same share of those that were not rejected. It is the baseline of `ERR`.
- `ERR`: the share of those that are served now: by an entry with the target's label, or by none if none is needed.
- `ERR, answered`: of a random 300 of them, the share for which the edited model predicts the target, token by token.

**`cases`.** Cases of corrections that an entry serves, at most 500 of a kind. None of them is a corrected prompt.

- `captured`: an entry serves the case. `own`: the entry that serves its correction. `elsewhere`: another entry.
- `correct`: of 100 paraphrases, the share for which the edited model predicts the target, token by token.
- `CounterFact neighbour`: the data's neighbour. If it names the subject of another correction, it may ask for the fact
  that this one changes. These are a kind of their own (`corrected subject`).
- `other relation`: KnowEdit's, without restatements. `unrelated`: questions of NQ that are not traffic.

**`cost`.** Means over the last 100 corrections, in CPU seconds on a CPU.

- `seconds`: the total. `examine`: the pass of the model. `radius`: the templates. `edit`: the rest. With trained
  values, `edit` includes the pass and the training.
- `steps`: training steps. `delta`: bytes of a delta. `lookup`: one prompt in a batch of 16, with known queries.
- `memory`: of the process, with the model and the queries of the prompts.

**`undo`.** Each correction belongs to one of two authors at random. One undo removes all corrections of the first
author.

- `equal`: 1 if all entries (keys, values, radii, labels, wordings) then equal, bit for bit, those of an engine that
  never had these corrections. That engine takes queries, values and traffic distances from the log, as the undo does.
- `decided again`: corrections that depended on the removed ones.
- `seconds`: wall-clock time.

An interrupted run resumes where it stopped. The corrections and their deltas are in the folder `bench` under
`GRACESTREAM_CACHE_DIR`. The name of a stream's folder is a digest of the model, the settings, the data and the code
that decides. Any change of these starts a new stream. `--only` runs one stream. `--quick` applies 50 and 200
corrections.
"""

from tests.bench.stream.report import run

__all__ = ["run"]
