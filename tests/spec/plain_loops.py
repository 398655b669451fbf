"""Every way to draft written the short and obvious way: no cache, no batch, no engine; what the engine must equal.

A loop is called once a step with the whole text, and answers with its draft as the set of its paths: the chain a, b is
``{(a,), (a, b)}``. It is made anew for each prompt. Targets are toys, so that a whole pass a token is cheap enough.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from outrider.core.rng import Stream, uniform
from outrider.models.decoder import Decoder
from tests.engine.heads import Tensors, embedding_of, final_norm, run_through
from tests.models.adapter_plain import adapter_rows
from tests.models.eagle_plain import plain_rows
from tests.toy import full_logits

Paths = Collection[tuple[int, ...]]
Loop = Callable[[list[int], int], Paths]
"""From the text so far and the most nodes that are wanted to the paths of a draft."""


def chain(tokens: Sequence[int]) -> Paths:
    """The paths of a chain."""
    return {tuple(tokens[: i + 1]) for i in range(len(tokens))}


def acceptance(
    make: Callable[[list[int], int], Loop],
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
    gamma: int,
    n: int,
) -> list[float]:
    """By depth, how often a draft's token is right: greedy decoding of ``n`` tokens a prompt, with known answers.

    ``make`` gives the loop for a prompt and its number.
    """
    drafts, right = 0, [0] * gamma
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        loop, done = make(prompt, number), 0
        while done < n:
            paths, accepted = loop(prompt + answer[:done], gamma), 0
            drafts += bool(paths)
            while tuple(answer[done : done + accepted + 1]) in paths:
                right[accepted] += 1
                accepted += 1
            done += accepted + 1
    return [count / drafts for count in right]


def best_after(model: Decoder, tokens: list[int], **options: Any) -> int:
    """The likeliest token after a text, in one pass over all of it."""
    return int(full_logits(model, tokens, **options)[-1].argmax())


def agreeing(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens at the ends of two texts are the same."""
    n = 0
    while n < min(len(a), len(b)) and a[-1 - n] == b[-1 - n]:
        n += 1
    return n


def lasting(same: int, depth: int) -> float:
    """The chance that a match of ``same`` tokens goes on for ``depth`` more."""
    held = max(2, same - 2)
    return held / (held + depth)


def ngram(longest: int = 4, shortest: int = 1, factor: int = 4, least: float = 0.25) -> Loop:
    """What followed the last time the newest tokens stood in the text, the longest n-gram first, while it is likely."""

    def loop(text: list[int], n: int) -> Paths:
        for size in range(longest, shortest - 1, -1):
            ends = [end for end in range(len(text) - 1, size - 1, -1) if text[end - size : end] == text[-size:]][:16]
            if ends:
                share = sum(text[end] == text[ends[0]] for end in ends) / (len(ends) + 4 ** (1 - size))
                same = min(24, agreeing(text[: ends[0]], text))
                copy: list[int] = []
                while len(copy) < min(n, factor * same) and share * lasting(same, len(copy) + 1) >= least:
                    copy.append((text + copy)[ends[0] + len(copy)])
                return chain(copy)
        return ()

    return loop


def suffix(depth: int = 24, factor: float = 4.0, least: float = 0.18, branches: int = 3) -> Loop:
    """The likeliest continuations of all earlier places, by how many and how good are for them and against them."""

    def loop(text: list[int], n: int) -> Paths:
        places: list[tuple[int, int]] = []
        for at in range(len(text) - 1, 0, -1):
            same = min(depth, agreeing(text[:at], text))
            if same:
                places.append((at, same))
        longest = max((same for _, same in places), default=0)
        tree: list[tuple[int, ...]] = []
        waiting: list[tuple[float, tuple[int, ...], list[tuple[int, int]]]] = [(1.0, (), places)]
        while waiting and len(tree) <= min(n, int(factor * longest)):
            chance, path, group = max(waiting, key=lambda node: node[0])
            waiting.remove((chance, path, group))
            tree.append(path)
            children: dict[int, list[tuple[int, int]]] = {}
            for at, same in group:
                children.setdefault(text[at + len(path) % (len(text) - at)], []).append((at, same))
            weighed = []
            for token, heirs in children.items():
                others = [same for other, their in children.items() if other != token for _, same in their]
                fair = 0.8 * max(same for _, same in heirs) * len(heirs)
                fair /= (1 + max(others, default=0)) * (1 + len(others)) ** 0.5
                weighed.append((chance * (fair / (1 + fair)), (*path, token), heirs))
            weighed.sort(key=lambda node: -node[0])
            waiting += [node for node in weighed[:branches] if node[0] >= least]
        return tree[1:]  # the first one is the empty path

    return loop


def prediction(n_prompt: int, predicted: list[int], match: int = 2) -> Loop:
    """Goes on in the predicted answer; where the answer left it, finds the place again by the newest tokens."""
    at = read = failures = 0
    lost = False

    def loop(text: list[int], n: int) -> Paths:
        nonlocal at, read, failures, lost
        answer = text[n_prompt:]
        for token in answer[read:] if not lost else ():
            lost = predicted[at : at + 1] != [token]
            at, failures = (at, failures + 1) if lost else (at + 1, 0)
            if lost:
                break
        read = len(answer)
        wanted = match + failures - 1
        if lost and len(answer) >= wanted:
            ends = [e for e in range(wanted, len(predicted) + 1) if predicted[e - wanted : e] == answer[-wanted:]]
            if ends:
                was, lost = at, False
                at = max(ends, key=lambda e: (agreeing(predicted[:e], answer), e >= was, -abs(e - was)))
        return () if lost else chain(predicted[at : at + n])

    return loop


def model(drafter: Decoder) -> Loop:
    """A draft model's likeliest tokens, one after the other."""

    def loop(text: list[int], n: int) -> Paths:
        out: list[int] = []
        while len(out) < n:
            out.append(best_after(drafter, text + out))
        return chain(out)

    return loop


def self_draft(target: Decoder, skipped: Collection[int]) -> Loop:
    """The target without some layers, from the newest token on: before it the draft sees what the target computed."""

    def loop(text: list[int], n: int) -> Paths:
        out: list[int] = []
        while len(out) < n:
            out.append(best_after(target, text + out, skipped=skipped, skip_from=len(text) - 1))
        return chain(out)

    return loop


def adapted_exit(
    target: Decoder, values: Mapping[str, Any], tensors: Tensors, exit_layer: int, least: float = 0.0
) -> Loop:
    """The first layers and the adapter over all of the text, until a token comes that was not likely enough."""

    def loop(text: list[int], n: int) -> Paths:
        out: list[int] = []
        chance = 1.0
        while len(out) < n and chance >= least:
            states = run_through(target, text + out, (exit_layer - 1,))[0]
            logits = adapter_rows(values, tensors, states)[-1] @ torch.as_tensor(target.head).T
            chance = float(logits.softmax(-1).max())
            out.append(int(logits.argmax()))
        return chain(out)

    return loop


def medusa(target: Decoder, tensors: Tensors) -> Loop:
    """Head h's likeliest token at depth h, all from the last hidden state before the newest token."""

    def loop(text: list[int], n: int) -> Paths:
        last = target.config.n_layers - 1
        x = final_norm(target, run_through(target, text[:-1], (last,))[0])[-1]
        out: list[int] = []
        for h in range(n):
            block = torch.nn.functional.silu(x @ tensors[f"{h}.0.linear.weight"].T + tensors[f"{h}.0.linear.bias"])
            out.append(int(((x + block) @ tensors[f"{h}.1.weight"].T).argmax()))
        return chain(out)

    return loop


def eagle(target: Decoder, values: Mapping[str, Any], tensors: Tensors) -> Loop:
    """The head over all of the text, its own guess of the next feature fed back with each token it drafts."""
    third = "draft_vocab_size" in values
    table, head = embedding_of(target), tensors.get("lm_head.weight", torch.as_tensor(target.head))

    def features(text: list[int]) -> torch.Tensor:
        if not third:
            return final_norm(target, run_through(target, text, (target.config.n_layers - 1,))[0])
        layers = tuple(i - 1 for i in values["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        return run_through(target, text, layers)[0] @ tensors["fc.weight"].T

    def loop(text: list[int], n: int) -> Paths:
        given, tokens = features(text[:-1]), text[1:]
        for _ in range(n):
            fed, states = plain_rows(values, tensors, given, table[torch.tensor(tokens)])
            row = int((states[-1] @ head.T).argmax())
            given, tokens = torch.cat((given, fed[-1:])), [*tokens, row + int(tensors["d2t"][row]) if third else row]
        return chain(tokens[len(text) - 1 :])

    return loop


def lookahead(target: Decoder, seed: int, window: int = 4, size: int = 3, guesses: int = 4) -> Loop:
    """Jacobi iteration: a window of guesses, one row of it older than the next, whose columns become n-grams.

    ``seed`` is the sequence's: the window begins with tokens of the text that are picked at random.
    """
    pool: dict[int, list[tuple[int, ...]]] = {}  # by first token, newest first
    rows: list[list[int]] = [[]]
    outcomes: list[int] = []
    read = 0

    def add(gram: Sequence[int]) -> None:
        tails = pool.setdefault(gram[0], [])
        tails[:] = [tuple(gram[1:]), *(tail for tail in tails if tail != tuple(gram[1:]))][:guesses]

    def loop(text: list[int], n: int) -> Paths:
        nonlocal rows, outcomes, read
        if outcomes:
            if len(rows) == size - 1:
                for column, outcome in enumerate(outcomes):
                    add([*(row[column] for row in rows), outcome])
            full = len(rows) == size - 1  # then the oldest row goes, and the window stands one token further on
            rows = [row[len(text) - read - full :] for row in [*rows, outcomes][full:]]
        for end in range(max(read + 1, size), len(text) + 1):
            add(text[end - size : end])
        read = len(text)
        for r, row in enumerate(rows):
            for c in range(len(row), window):
                row.append(text[int(len(text) * uniform(seed, len(text), r, c, Stream.DRAFT))])
        rows[0][0] = text[-1]
        columns = [[*rows[0][1 : c + 1], *(row[c] for row in rows[1:])] for c in range(window)]
        outcomes = [best_after(target, text + column) for column in columns]
        return {path for tail in pool.get(text[-1], ()) for path in chain(tail)}

    return loop
