"""Whether gracestream works on this GPU, how exact it is, and how fast: `make gpu`.

Seconds are synchronised wall time. A floor is the number of bytes that must be read, divided by the copy rate of the
device itself. It is the baseline of a time. Models with random weights have the widths of GPT2-XL, BERT-base and T5
v1.1 small, and their depth unless the name says otherwise. SmolLM2 is measured if its weights are on the machine. A
part fails if one of its checks fails.

- `tests`: the tests marked `gpu`, in a process of their own. On a GPU, the part fails if no test ran.
- `lookup`: milliseconds of a lookup of one query and of 32. `ours`: the product's. `torch`: torch alone, if the product
  uses FAISS on this device. `cdist`: `torch.cdist` and a minimum. `addmm`: one product with cached norms, and the eight
  largest. Keys have mean zero, or lie far from the origin. Check: a lookup finds the same key as brute force in
  float64, and the same entry serves.
- `tolerance`: the largest movement of a query, relative to its norm, between batches of 1, 2 and 32, and beside a
  longer prompt. `own-device`: on the device. `with-cpu`: between the device and the CPU. The baseline is the product's
  tolerance. Check: no query moves farther than two tolerances, which every radius includes.
- `determinism`: the same stream of corrections twice, some alone and some waiting together. Check: every delta is the
  same, byte for byte.
- `edit`: corrections per second, one at a time and 16 waiting together. The baseline is a textbook GRACE with frozen
  weights and the same number of steps. `smollm2` uses the default recipe on the demo's facts.
- `serve`: answers per second with an empty and a filled codebook. The baseline is the unedited model; they take turns.
- `engines`: answers per second of the continuous and the batch engine to a backlog of corrected and long requests,
  with 100,000 further entries. `bare`: the continuous engine without a codebook. The baseline is transformers'
  `generate`, 32 requests at a time. Check: each corrected request gets its target.
- `memory`: bytes on the device of an index, compared with its keys, and of a model, compared with its weights. Also the
  peak memory that serving and editing add.
"""
