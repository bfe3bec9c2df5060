"""How well a language model predicts: the same for all tools.

Imported in the virtual environment of each of them.
"""

import json
import math
import sys
from pathlib import Path

#: Windows of which the float model's predictions are compared; and those that are run at once.
COMPARED, _AT_ONCE = 64, 8


def floats_of(windows):
    """The file of the float model's predictions, beside that of the windows."""
    return Path(windows).with_name("floats.npy")


def losses_of(windows):
    """The file of what was lost last on each window, beside that of the windows."""
    return Path(windows).with_name("losses.npy")


def keep_floats(model, score, windows):
    """Write what a float model predicts: logarithms of probabilities, (windows, tokens, vocabulary)
    float32.
    """
    import numpy as np

    with floats_of(windows).open("wb") as file:
        np.save(
            file,
            np.concatenate(
                [part.numpy() for part in _predictions(model, score[:COMPARED])]
            ),
        )


def scored(model, score, windows):
    """The perplexity on token ids of shape (windows, tokens), all but the first of a window
    predicted; and, where the float model's predictions are kept, the mean Kullback-Leibler
    divergence from them, in nats for each token. Beside the windows it writes what each of them has
    lost, in nats for each token.
    """
    import numpy as np
    import torch

    wanted = (
        np.load(floats_of(windows), mmap_mode="r")
        if floats_of(windows).exists()
        else ()
    )
    losses, divergence = [], 0.0
    for start, found in zip(
        range(0, len(score), _AT_ONCE), _predictions(model, score), strict=True
    ):
        chosen = found[:, :-1].gather(-1, score[start : start + _AT_ONCE, 1:, None])
        losses.append(-chosen.double().mean((1, 2)).numpy())
        if len(own := torch.from_numpy(np.array(wanted[start : start + _AT_ONCE]))):
            divergence += float((own.exp() * (own - found[: len(own)])).double().sum())
    lost = np.concatenate(losses)
    np.save(losses_of(windows), lost)
    result = {"value": math.exp(lost.mean())}
    return result | (
        {"divergence": divergence / (len(wanted) * score.shape[1])}
        if len(wanted)
        else {}
    )


def stand_in_tokenizer():
    """For tools that ask for one, where the windows are tokens already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"": 0}, unk_token="")), pad_token=""
    )


def told(main):
    """Print what a tool has found, or its error, on a line of its own: the last one."""
    try:
        found = main(*sys.argv[1:])
    except Exception as error:
        found = {
            "error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        }
    print("\n" + json.dumps(found), flush=True)


def _predictions(model, score):
    import torch

    with torch.no_grad():
        for rows in score.split(_AT_ONCE):
            yield torch.log_softmax(model(input_ids=rows).logits.float(), -1)
