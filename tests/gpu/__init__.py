"""Whether gracestream works on this GPU, how exactly and how fast: `make gpu`.

Seconds are synchronised wall time on a GPU. A floor is the bytes that have to be read over the device's own copy rate.
Models of random weights have the widths and, unless their name says otherwise, the depth of GPT2-XL, BERT-base and
T5 v1.1 small; SmolLM2 is measured where its weights are. A part fails where a check of it does.

- `tests`: the tests marked `gpu`, in a process of their own; a GPU on which none of them ran fails.
- `lookup`: milliseconds of a look-up for one query and for 32, against its floor; `torch`: by torch alone, where FAISS
  is for this device; `cdist`: `torch.cdist` and a minimum; `addmm`: one product with cached norms and the eight
  largest. Keys of mean zero, and keys far from the origin. Checked: it finds the key that brute force in float64
  finds, and serves the same queries.
- `tolerance`: how far a query moves at most in batches of 1, 2 and 32 and beside a longer prompt, relative to its norm:
  on the device, and on the CPU from where it was on the device. In parentheses stands what the product assumes.
  Checked: no query moves farther than two tolerances, which every radius holds.
- `determinism`: the same stream of corrections twice, some alone and some that wait. Checked: every delta is the same,
  byte for byte.
- `edit`: corrections a second, one at a time and 16 that wait, against a textbook GRACE with frozen weights that takes
  the same steps; `smollm2` with the default recipe on the demo's facts.
- `serve`: answers a second with an empty and a filled codebook, against the unedited model; they take turns.
- `memory`: bytes on the device of an index, against those of its keys; of a model, against those of its weights; and
  what serving and editing add at their peak.
"""
