"""The stacked transformer and its log-probabilities of responses."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from aggcli.errors import SettingError
from aggcli.policy import log_probs, protocol
from aggcli.policy import packing as packing_module
from aggcli.policy import warm_start as warm
from aggcli.policy.groups import groups_of, threads_for
from aggcli.policy.log_probs import response_log_probs
from aggcli.policy.packing import Packing, pack
from aggcli.policy.protocol import Shards
from aggcli.policy.transformer import (
    ByAutograd,
    Parameters,
    PolicyConfig,
    attend_rows,
    body,
    hidden,
    initial_parameters,
    logits,
    run_of,
    shapes,
    stacked,
)
from aggcli.tasks import make_task
from tests.fake_cuda import fake_cuda

CONFIG = PolicyConfig(vocabulary_size=7, max_length=20, layers=2, width=16, heads=2)
PROMPT = 4


@pytest.fixture(params=[False, True], ids=["short prompts", "long prompts"])
def are_long(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether prompts count as long, so that pieces but the first only see them."""
    monkeypatch.setattr(packing_module, "LONG_PROMPT", 1 if request.param else PROMPT + 1)
    return request.param


def policies(runs: int, config: PolicyConfig = CONFIG) -> Parameters:
    made = [initial_parameters(config, torch.Generator().manual_seed(run), torch.float64) for run in range(runs)]
    return {name: torch.cat([one[name] for one in made]) for name in made[0]}


def rows_of(runs: int, groups: int = 3, repeats: int = 4, longest: int = 11) -> tuple[Tensor, Tensor]:
    """Rows that share prompts in groups, with responses of 0 to `longest` tokens, and noise as padding."""
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(0, 7, (runs, groups, PROMPT), generator=generator).repeat_interleave(repeats, 1)
    response = torch.randint(0, 7, (runs, groups * repeats, longest), generator=generator)
    length_RB = torch.randint(0, longest + 1, (runs, groups * repeats), generator=generator)
    length_RB[:, :3] = torch.tensor([0, 1, longest])
    return torch.cat([prompts, response], -1), length_RB


def by_hand(parameters: Parameters, tokens: list[int]) -> list[list[float]]:
    """Logits of one row of run 0 by loops over positions, heads and keys."""
    weight = {name: value[0].tolist() for name, value in parameters.items()}
    size, heads = CONFIG.head_width, CONFIG.heads

    def times(vector: list[float], matrix: list[list[float]]) -> list[float]:
        return [sum(v * row[j] for v, row in zip(vector, matrix, strict=True)) for j in range(len(matrix[0]))]

    def normed(vector: list[float]) -> list[float]:
        return [v / math.sqrt(sum(u * u for u in vector) / len(vector)) for v in vector]

    stream = [
        [a + b for a, b in zip(weight["embedding"][token], weight["position"][place], strict=True)]
        for place, token in enumerate(tokens)
    ]
    for layer in range(CONFIG.layers):
        qkv = [times(normed(x), weight[f"layers.{layer}.qkv"]) for x in stream]
        for place in reversed(range(len(tokens))):
            mixed: list[float] = []
            for head in range(heads):
                part = slice(head * size, (head + 1) * size)
                key_part = slice(16 + head * size, 16 + (head + 1) * size)
                value_part = slice(32 + head * size, 32 + (head + 1) * size)
                scores = [
                    math.exp(sum(q * k for q, k in zip(qkv[place][part], qkv[j][key_part], strict=True)) / math.sqrt(size))
                    for j in range(place + 1)
                ]
                mixed += [
                    sum(score / sum(scores) * qkv[j][value_part][d] for j, score in enumerate(scores)) for d in range(size)
                ]
            added = times(mixed, weight[f"layers.{layer}.attention_out"])
            stream[place] = [a + b for a, b in zip(stream[place], added, strict=True)]
        for place, x in enumerate(stream):
            active = [max(v, 0.0) for v in times(normed(x), weight[f"layers.{layer}.mlp_in"])]
            stream[place] = [a + b for a, b in zip(x, times(active, weight[f"layers.{layer}.mlp_out"]), strict=True)]
    return [times(normed(x), weight["head"]) for x in stream]


def test_logits_are_those_of_attention_written_as_loops():
    parameters = policies(2)
    tokens = [3, 1, 4, 1, 5, 2, 6]
    expected = torch.tensor([by_hand(parameters, tokens)], dtype=torch.float64)
    got = logits(run_of(parameters, 0), CONFIG, torch.tensor([[tokens]]))[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("are_long")
@pytest.mark.parametrize("packed", [False, True])
def test_response_log_probs_and_entropies_are_those_of_each_row_alone(packed: bool):
    parameters = policies(2)
    tokens_RBL, length_RB = rows_of(2)
    prompt = PROMPT if packed else torch.full((2, 12), PROMPT)
    log_prob_RBC, entropy_RBC = response_log_probs(parameters, CONFIG, tokens_RBL, prompt, length_RB, entropy=True)
    assert entropy_RBC is not None
    for run in range(2):
        for row in range(12):
            n = int(length_RB[run, row])
            alone = tokens_RBL[run, row, : PROMPT + n]
            log_probs_LV = logits(run_of(parameters, run), CONFIG, alone[None, None])[0, 0].log_softmax(-1)
            expected = [float(log_probs_LV[PROMPT + c - 1, alone[PROMPT + c]]) for c in range(n)]
            spread = [-sum(math.exp(v) * v for v in log_probs_LV[PROMPT + c - 1].tolist()) for c in range(n)]
            rest = [0.0] * (log_prob_RBC.shape[-1] - n)
            assert log_prob_RBC[run, row].tolist() == pytest.approx(expected + rest, abs=1e-12)
            assert entropy_RBC[run, row].tolist() == pytest.approx(spread + rest, abs=1e-12)


def test_rows_may_have_prompts_of_different_length():
    parameters, (tokens_RBL, length_RB) = policies(1), rows_of(1)
    prompt_RB = torch.arange(12)[None] % 3 + 2
    length_RB = (length_RB - 2).clamp(min=0)
    log_prob_RBC, _ = response_log_probs(parameters, CONFIG, tokens_RBL, prompt_RB, length_RB)
    for row in range(12):
        prompt, n = int(prompt_RB[0, row]), int(length_RB[0, row])
        alone = tokens_RBL[:, row : row + 1, : prompt + n]
        expected, _ = response_log_probs(parameters, CONFIG, alone, prompt, torch.tensor([[n]]))
        torch.testing.assert_close(log_prob_RBC[0, row, :n], expected[0, 0, :n], rtol=0, atol=1e-12)


def gradients(
    parameters: Parameters, tokens_RBL: Tensor, length_RB: Tensor, prompt: int | Tensor, scale_R: Tensor | float = 1.0
) -> list[Tensor]:
    """Of an arbitrary weighted sum of log-probabilities and entropies, each run's scaled by `scale_R`."""
    leaves = {name: value.clone().requires_grad_(True) for name, value in parameters.items()}
    log_prob, entropy = response_log_probs(leaves, CONFIG, tokens_RBL, prompt, length_RB, entropy=True)
    assert entropy is not None
    weight = torch.linspace(-1, 2, log_prob.shape[1] * log_prob.shape[2], dtype=torch.float64).view(log_prob.shape[1:])
    return list(
        torch.autograd.grad(((log_prob * weight + entropy * weight.cos()).sum((1, 2)) * scale_R).sum(), list(leaves.values()))
    )


def test_a_run_of_a_stack_is_the_run_alone_and_so_are_its_gradients():
    parameters, (tokens_RBL, length_RB) = policies(4), rows_of(4)
    length_RB[2] = length_RB[2].clamp(max=3)  # another run than the longest decides nothing here
    length_RB[:, 0] = 11
    together, _ = response_log_probs(parameters, CONFIG, tokens_RBL, PROMPT, length_RB)
    slopes = gradients(parameters, tokens_RBL, length_RB, PROMPT)
    for run in range(4):
        part = slice(run, run + 1)
        alone, _ = response_log_probs(run_of(parameters, run), CONFIG, tokens_RBL[part], PROMPT, length_RB[part])
        torch.testing.assert_close(together[part], alone, rtol=0, atol=1e-12)
        for slope, own in zip(
            slopes, gradients(run_of(parameters, run), tokens_RBL[part], length_RB[part], PROMPT), strict=True
        ):
            torch.testing.assert_close(slope[part], own, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("runs", "most", "sizes"), [(1, 4, [1]), (2, 4, [2]), (20, 8, [6, 7, 7]), (20, 4, [4] * 5), (3, 1, [1] * 3)]
)
def test_runs_are_cut_into_even_groups(runs: int, most: int, sizes: list[int]):
    groups = groups_of(runs, most, torch.device("cpu"))
    assert [group.stop - group.start for group in groups] == sizes
    assert [group.start for group in groups] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert groups_of(runs, most, torch.device("cuda")) == [slice(0, runs)]


@pytest.mark.parametrize(("width", "threads"), [(64, 1), (255, 1), (256, 2)])
def test_small_policies_have_one_thread_an_operation_and_the_others_those_there_are(width: int, threads: int):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with threads_for(width):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("are_long")
def test_gradients_of_packed_rows_are_those_of_padded_rows():
    parameters, (tokens_RBL, length_RB) = policies(2), rows_of(2)
    padded = gradients(parameters, tokens_RBL, length_RB, torch.full((2, 12), PROMPT))
    for packed, expected in zip(gradients(parameters, tokens_RBL, length_RB, PROMPT), padded, strict=True):
        torch.testing.assert_close(packed, expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("are_long")
def test_gradients_are_those_of_finite_differences():
    """Of two blocks: one before another, and the last."""
    config = PolicyConfig(vocabulary_size=5, max_length=6, layers=2, width=4, heads=2)
    parameters = policies(1, config)
    tokens_RBL = torch.tensor([[[1, 2, 3, 0, 4], [1, 2, 0, 4, 4], [3, 2, 1, 0, 0]]])
    packing = pack(tokens_RBL, 2, torch.tensor([[3, 2, 1]]))
    names = list(parameters)

    def total(*values: Tensor) -> Tensor:
        given = dict(zip(names, values, strict=True))
        log_prob, entropy = log_probs.packed_log_probs(given, config, packing, entropy=True)
        assert entropy is not None
        return (log_prob * torch.tensor([1.0, -2.0, 3.0]) + entropy).sum()

    assert torch.autograd.gradcheck(total, [parameters[name].requires_grad_(True) for name in names], atol=1e-6)


@pytest.mark.parametrize("prompt", [PROMPT, torch.full((2, 12), PROMPT)], ids=["packed", "padded"])
def test_several_gradients_can_be_taken_through_one_pass(prompt: int | Tensor):
    parameters = {name: value.requires_grad_(True) for name, value in policies(2).items()}
    tokens_RBL, length_RB = rows_of(2)
    log_prob_RBC, _ = response_log_probs(parameters, CONFIG, tokens_RBL, prompt, length_RB)
    first = torch.autograd.grad(log_prob_RBC.sum(), list(parameters.values()), retain_graph=True)
    second = torch.autograd.grad(2 * log_prob_RBC.sum(), list(parameters.values()))
    for one, twice in zip(first, second, strict=True):
        torch.testing.assert_close(2 * one, twice, rtol=1e-14, atol=0)


def test_the_hidden_states_of_some_tokens_are_those_of_all_and_so_is_their_gradient():
    parameters = {name: value.requires_grad_(True) for name, value in policies(2).items()}
    x_RTD = torch.randn(2, 3 * 5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    rows, wanted = ByAutograd(attend_rows(CONFIG, 3)), torch.tensor([14, 2, 3, 9])
    some_RKD = body(parameters, CONFIG, x_RTD, rows, wanted)
    of_all_RKD = body(parameters, CONFIG, x_RTD, rows)[:, wanted]
    torch.testing.assert_close(some_RKD, of_all_RKD, rtol=0, atol=1e-13)
    weight_RKD = torch.linspace(-1, 2, some_RKD.numel(), dtype=torch.float64).view_as(some_RKD)
    by = [x_RTD, *(value for name, value in parameters.items() if name.startswith("layers."))]
    for one, other in zip(
        *(torch.autograd.grad((found * weight_RKD).sum(), by) for found in (some_RKD, of_all_RKD)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
def test_padding_never_reaches_a_real_token(packed: bool):
    parameters, (tokens_RBL, length_RB) = policies(2), rows_of(2)
    prompt = PROMPT if packed else torch.full((2, 12), PROMPT)
    padding_RBL = torch.arange(tokens_RBL.shape[-1]) >= PROMPT + length_RB[..., None]
    changed_RBL = torch.where(padding_RBL, (tokens_RBL + 3) % 7, tokens_RBL)
    one, _ = response_log_probs(parameters, CONFIG, tokens_RBL, prompt, length_RB)
    other, _ = response_log_probs(parameters, CONFIG, changed_RBL, prompt, length_RB)
    assert torch.equal(one, other)
    for slope, changed in zip(
        gradients(parameters, tokens_RBL, length_RB, prompt), gradients(parameters, changed_RBL, length_RB, prompt), strict=True
    ):
        torch.testing.assert_close(slope, changed, rtol=0, atol=1e-13)


def test_every_token_is_taken_from_a_piece_that_holds_it_and_padding_is_small():
    tokens_RBL, length_RB = rows_of(3, groups=16, repeats=8)
    tokens_RBL[:, :, PROMPT] = torch.arange(128) + 7  # no row begins as another does
    packing = pack(tokens_RBL, PROMPT, length_RB)
    read_R = (length_RB - 1).clamp(min=0).sum(-1)
    T = packing.tokens_RT.shape[1]
    assert int(read_R.max()) + 16 * PROMPT == T
    held_M = torch.cat([piece.token_NL.flatten() for piece in packing.bins])
    for run, taken_T in enumerate(packing.taken_RT):
        real = 16 * PROMPT + int(read_R[run])
        assert held_M[taken_T[:real]].tolist() == list(range(run * T, run * T + real))
        assert (held_M[taken_T[real:]] // T == run).all(), "what pads a run is taken from that run"
    for pieces in packing.bins:
        assert (pieces.token_NL // T == pieces.token_NL[:, :1] // T).all(), "a piece is of one run"
        assert (packing.positions_RT.flatten()[pieces.token_NL[:, :PROMPT]] == torch.arange(PROMPT)).all()
    pieces = sum(len(piece.token_NL) for piece in packing.bins)
    assert len(held_M) < 1.3 * (pieces * PROMPT + int(read_R.sum()))
    places = packing.predicted_at_RBC[packing.valid_RBC & (torch.arange(11) > 0)]
    per_run = (length_RB - 1).clamp(min=0).sum(-1).tolist()
    for run, own in enumerate(places.split(per_run)):
        assert own.unique().numel() == per_run[run]


def texts_of(packing: Packing, tokens_RBL: Tensor) -> dict[int, list[int]]:
    """What each token of the flat lists goes on from, itself included, from the rows that are predicted there."""
    T, prompts = packing.tokens_RT.shape[1], packing.prompts * PROMPT
    found: dict[int, list[int]] = {}
    for run, row, column in packing.valid_RBC.nonzero().tolist():
        at = int(packing.predicted_at_RBC[run, row, column])
        last = (at + 1) * PROMPT - 1 if at < packing.prompts else prompts + at - packing.prompts
        text = tokens_RBL[run, row, : PROMPT + column].tolist()
        assert found.setdefault(run * T + last, text) == text
        if at < packing.prompts:
            found |= {run * T + at * PROMPT + place: text[: place + 1] for place in range(PROMPT)}
    return found


@pytest.mark.parametrize("made", ["alike", "random", "long"])
def test_a_token_sees_what_it_goes_on_from_and_nothing_else(made: str, are_long: bool):
    rows = {"alike": lambda: alike(2), "random": lambda: rows_of(2, repeats=12), "long": lambda: rows_of(2, 1, 40, longest=16)}
    tokens_RBL, length_RB = rows[made]()
    packing = pack(tokens_RBL, PROMPT, length_RB)
    texts = texts_of(packing, tokens_RBL)
    several, queries = 0, Counter[int]()
    for pieces in packing.bins:
        seen_NQL = pieces.mask_N1QL[:, 0] == 0
        assert seen_NQL.any(-1).all(), "what pads sees something, or it were not a number"
        for token_L, number_L, seen_QL in zip(pieces.token_NL.tolist(), pieces.number_NL.tolist(), seen_NQL, strict=True):
            real = [place for place, number in enumerate(number_L) if number < pieces.end_NL.max() - 1]
            assert len(seen_QL) == len(number_L) - pieces.only_seen
            for place in real[pieces.only_seen :]:
                queries[token_L[place]] += 1
                keys = seen_QL[place - pieces.only_seen].nonzero().flatten().tolist()
                positions = [int(packing.positions_RT.flatten()[token_L[key]]) for key in keys]
                assert positions == list(range(len(positions)))
                assert [int(packing.tokens_RT.flatten()[token_L[key]]) for key in keys] == texts[token_L[place]]
            several += len(real) > PROMPT + int(length_RB.max())
    assert several, "some piece holds more than one row"
    prompts = [run * packing.tokens_RT.shape[1] + at for run in range(2) for at in range(packing.prompts * PROMPT)]
    pieces_of_prompts = Counter(int(at) for pieces in packing.bins for at in pieces.token_NL[:, 0])
    for at in prompts:
        assert queries[at] == (1 if are_long else pieces_of_prompts[at - at % packing.tokens_RT.shape[1] % PROMPT])
    assert max(pieces_of_prompts.values()) > 1 or made == "alike", "some prompt has several pieces"


def test_responses_share_a_piece_where_that_costs_less():
    tokens_RBL = torch.zeros(1, 24, PROMPT + 101, dtype=torch.int64)
    tokens_RBL[0, :, PROMPT] = torch.arange(24)
    # Of 104 tokens: 2 * 104 * 168 = 34,944 < 204 * 268 = 54,672, so each alone. Of 14: 2 * 14 * 78 = 2,184 > 24 * 88 = 2,112,
    # but 2,112 + 14 * 78 = 3,204 < 34 * 98 = 3,332, so two. Of 6, eight cost 20 * 84 / 8 = 210 each and nine 22 * 86 / 9 > 210.
    for longest, shared in ((101, 1), (11, 2), (3, 8)):
        packing = pack(tokens_RBL, PROMPT, torch.full((1, 24), longest))
        (pieces,) = packing.bins
        assert len(pieces.token_NL) * shared == 24, longest
        assert pieces.token_NL.shape[1] == PROMPT + (longest - 1) * shared


def test_long_prompts_see_themselves_in_one_piece_alone_and_pieces_are_as_large_as_that_pays(monkeypatch: pytest.MonkeyPatch):
    """Responses of which 3 tokens are read. In the first piece one more of them costs 6 s + 201 at a size of s = 4 + 3 k: at
    most what k of them cost by the mean, s (s + 64) / k, up to k = 5 (315 <= 315.4), not at 6 (333 > 315.3). In the others it
    is 6 s + 189 against s (s + 60) / k: up to k = 4 (285 <= 304), not at 5 (303 > 300.2)."""
    monkeypatch.setattr(packing_module, "LONG_PROMPT", PROMPT)
    tokens_RBL = torch.zeros(1, 24, PROMPT + 4, dtype=torch.int64)
    tokens_RBL[0, :, PROMPT] = torch.arange(24)
    bins = pack(tokens_RBL, PROMPT, torch.full((1, 24), 4)).bins
    assert [(*pieces.token_NL.shape, pieces.only_seen) for pieces in bins] == [(1, 22, 0), (4, 19, PROMPT)]
    assert [tuple(pieces.mask_N1QL.shape) for pieces in bins] == [(1, 1, 22, 22), (4, 1, 15, 19)]


def alike(runs: int) -> tuple[Tensor, Tensor]:
    """Rows of two prompts, of which many are equal, or begin as others go on, or would but for their prompt."""
    a, b, c = [3, 1, 4, 1, 5], [3, 1, 4, 0, 0], [2, 2, 2, 2, 2]
    one = [(a, 5), (a, 5), (a, 2), (b, 4), (b, 3), (c, 1), (c, 0), (a, 4)]  # reads 3141, 3141, 3, 314, 31, -, -, 314
    two = [(c, 5), (a, 5), (b, 5), (c, 3), (c, 3), (b, 5), (a, 1), (c, 5)]  # reads 2222, 3141, 3140, 22, 22, 3140, -, 2222
    rows = torch.tensor([[6] * PROMPT + row for row, _ in one] + [[0] * PROMPT + row for row, _ in two])
    length = torch.tensor([n for _, n in one + two])
    order = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(run)) for run in range(runs)])
    return rows[order], length[order]


def test_beginnings_that_rows_share_are_read_once_and_never_across_prompts():
    tokens_RBL, length_RB = alike(2)
    packing = pack(tokens_RBL, PROMPT, length_RB)
    # prompt 0: 2222, 3141 and of 3140 the last; prompt 6: 3141
    assert packing.tokens_RT.shape[1] == 2 * PROMPT + 4 + 4 + 1 + 4
    for run in range(2):
        assert packing.tokens_RT[run, 2 * PROMPT :].tolist() == [2, 2, 2, 2, 3, 1, 4, 0, 1, 3, 1, 4, 1]
        assert packing.positions_RT[run, 2 * PROMPT :].tolist() == [4, 5, 6, 7, 4, 5, 6, 7, 7, 4, 5, 6, 7]
    (pieces,) = packing.bins
    prompts = ([6] * PROMPT, [0] * PROMPT)
    read = ([*prompts[0], 3, 1, 4, 1, *[6] * 8], [*prompts[1], 2, 2, 2, 2, 3, 1, 4, 0, 1, *[0] * 3])  # padded to 16
    assert packing.tokens_RT.flatten()[pieces.token_NL].tolist() == [read[0], read[0], read[1], read[1]]


def test_a_run_of_fewer_prompts_is_padded_from_itself():
    tokens_RBL, length_RB = rows_of(2)
    tokens_RBL[0, :, :PROMPT] = 0  # one prompt, where the other run has three
    packing = pack(tokens_RBL, PROMPT, length_RB)
    held_M = torch.cat([pieces.token_NL.flatten() for pieces in packing.bins])
    assert (held_M[packing.taken_RT] // packing.tokens_RT.shape[1]).tolist() == [
        [run] * packing.tokens_RT.shape[1] for run in range(2)
    ]
    assert packing.tokens_RT[0, : 3 * PROMPT].tolist() == [0] * 3 * PROMPT


def test_prompts_are_told_apart_whatever_the_bytes_of_their_ids():
    prompts_BL = torch.tensor([[256, 0], [1, 0], [0, 256], [0, 65536], [256, 0], [0, 0], [0, 1], [0, 256]])
    packing = pack(torch.nn.functional.pad(prompts_BL, (0, 2), value=5)[None], 2, torch.full((1, 8), 2))
    read = packing.tokens_RT[0, : packing.prompts * 2].view(-1, 2).tolist()
    assert sorted(read) == [[0, 0], [0, 1], [0, 256], [0, 65536], [1, 0], [256, 0]]
    first_of_row = packing.predicted_at_RBC[0, :, 0].tolist()  # what the first response token is predicted from
    assert [read[prompt] for prompt in first_of_row] == prompts_BL.tolist()


def test_numbers_whose_norm_overflows_are_finite_and_others_are_not():
    value_RQ = torch.tensor([[3e38, 3e38], [1.0, math.inf], [math.nan, 1.0], [0.0, -3e38]])
    assert Shards().finite(value_RQ).tolist() == [True, False, False, True]
    assert Shards().norm(value_RQ[:1]).item() == pytest.approx(float(torch.tensor(3e38)) * math.sqrt(2), rel=1e-12)


@pytest.mark.parametrize("at_once", [1, 2, 3, 2**20])
def test_the_norm_is_that_of_all_parts_that_are_converted(monkeypatch: pytest.MonkeyPatch, at_once: int):
    monkeypatch.setattr(protocol, "CONVERTED_AT_ONCE", at_once)
    value_RQ = torch.tensor([[1.0, 2.0, 4.0, 2.0], [2.0, 4.0, 0.0, 4.0]])
    assert Shards().norm(value_RQ).tolist() == pytest.approx([5.0, 6.0], rel=1e-15)
    assert Shards().norm(value_RQ).dtype == torch.float64


def test_rows_of_prompts_alone_have_no_response_token():
    parameters, (tokens_RBL, _) = policies(2), rows_of(2)
    log_prob, entropy = response_log_probs(
        parameters, CONFIG, tokens_RBL[:, :, :PROMPT], PROMPT, torch.zeros(2, 12, dtype=torch.int64), entropy=True
    )
    assert log_prob.tolist() == [[[0.0]] * 12] * 2
    assert entropy is not None
    assert entropy.tolist() == [[[0.0]] * 12] * 2


def test_a_run_that_is_not_finite_leaves_the_gradients_of_the_others_as_they_are():
    parameters, (tokens_RBL, length_RB) = policies(2), rows_of(2)
    length_RB[1] = 1  # the second run has less to read, so its list is padded, and its first row is shorter than the next
    length_RB[1, :2] = torch.tensor([3, 6])
    tokens_RBL[1, 1, :PROMPT] = tokens_RBL[1, 0, :PROMPT]
    tokens_RBL[1, :2, PROMPT] = torch.tensor([0, 5])
    fine = [slope[1] for slope in gradients(parameters, tokens_RBL, length_RB, PROMPT)]
    for value in parameters.values():
        value.detach()[0] = torch.nan
    for slope, expected in zip(gradients(parameters, tokens_RBL, length_RB, PROMPT), fine, strict=True):
        assert slope[0].isnan().any()
        assert torch.equal(slope[1], expected)


def test_rows_that_begin_alike_have_the_numbers_and_gradients_of_each_alone():
    parameters, (tokens_RBL, length_RB) = policies(3), alike(3)
    padded = torch.full((3, 16), PROMPT)
    one = response_log_probs(parameters, CONFIG, tokens_RBL, PROMPT, length_RB, entropy=True)
    other = response_log_probs(parameters, CONFIG, tokens_RBL, padded, length_RB, entropy=True)
    for got, expected in zip(one, other, strict=True):
        assert got is not None
        assert expected is not None
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    expected = gradients(parameters, tokens_RBL, length_RB, padded)
    for packed, slope in zip(gradients(parameters, tokens_RBL, length_RB, PROMPT), expected, strict=True):
        torch.testing.assert_close(packed, slope, rtol=0, atol=1e-12)


def test_a_shard_with_gathered_keys_computes_the_rows_of_the_whole():
    parameters, (tokens_RBL, _) = policies(2), rows_of(2)
    whole_RBLD = hidden(parameters, CONFIG, tokens_RBL)
    L, kept = tokens_RBL.shape[-1], torch.tensor([0, 1, 2, 3, 11, 12, 13, 14])  # the zig-zag share of rank 0 of 2
    every_layer = []
    hidden(
        parameters,
        CONFIG,
        tokens_RBL,
        positions=torch.arange(L),
        gather=lambda key, value, positions: every_layer.append((key, value, positions)) or (key, value, positions),
    )
    whole = iter(every_layer)
    shard_RBLD = hidden(
        parameters, CONFIG, tokens_RBL[..., kept], positions=kept, gather=lambda key, value, positions: next(whole)
    )
    torch.testing.assert_close(shard_RBLD, whole_RBLD[:, :, kept], rtol=0, atol=1e-12)


def test_padding_of_a_shard_stands_after_every_token():
    parameters, (tokens_RBL, _) = policies(1), rows_of(1)
    padded_RBL = torch.cat([tokens_RBL[..., :3], tokens_RBL[..., -2:], tokens_RBL[..., 3:]], -1)
    L = tokens_RBL.shape[-1]
    positions = torch.cat([torch.arange(3), torch.full((2,), CONFIG.max_length), torch.arange(3, L)])
    got = hidden(parameters, CONFIG, padded_RBL, positions=positions, gather=lambda *local: local)
    real = torch.cat([got[:, :, :3], got[:, :, 5:]], 2)
    torch.testing.assert_close(real, hidden(parameters, CONFIG, tokens_RBL), rtol=0, atol=1e-12)


def test_copies_of_a_run_are_equal_and_do_not_share_memory():
    one = initial_parameters(CONFIG, torch.Generator().manual_seed(0))
    three = stacked(one, 3)
    for name, value in three.items():
        assert value.is_contiguous()
        value[1] += 1
        assert torch.equal(value[0], one[name][0])
        assert torch.equal(value[2], one[name][0])


def test_every_precision_starts_at_the_same_point():
    single = initial_parameters(CONFIG, torch.Generator().manual_seed(3), torch.float32)
    double = initial_parameters(CONFIG, torch.Generator().manual_seed(3), torch.float64)
    assert all(torch.equal(single[name].double(), double[name]) for name in single)


def test_the_default_policy_has_about_a_hundred_thousand_parameters():
    task = make_task("running-sum")
    config = warm.default_policy(task, 32)
    assert sum(math.prod(shape) for shape in shapes(config).values()) == 104192
    assert config.max_length == 64
    assert warm.default_policy(task, 58).max_length == 128


def test_rows_longer_than_the_policy_are_refused():
    with pytest.raises(SettingError, match="rows of 21 tokens: the policy holds at most 20; raise its max_length"):
        logits(policies(1), CONFIG, torch.zeros(1, 1, 21, dtype=torch.int64))
    with pytest.raises(SettingError, match="policy width 30: must be a multiple of its 4 heads"):
        PolicyConfig(vocabulary_size=7, max_length=8, width=30)


def test_forward_and_backward_keep_to_one_device():
    tokens_RBL, length_RB = rows_of(2)
    packing = pack(tokens_RBL, PROMPT, length_RB)
    parameters = {name: torch.empty(2, *shape, device="meta", requires_grad=True) for name, shape in shapes(CONFIG).items()}
    log_prob, entropy = log_probs.packed_log_probs(parameters, CONFIG, packing.to("meta"), entropy=True)
    assert entropy is not None
    (log_prob.sum() + entropy.sum()).backward()
    prompt_RB = torch.full((2, 12), PROMPT, device="meta")
    hidden(parameters, CONFIG, tokens_RBL.to("meta"), positions=prompt_RB[..., None], gather=lambda *k: k).sum().backward()
    for value in parameters.values():
        assert value.grad is not None
        assert value.grad.device.type == "meta"


def test_padded_rows_run_on_cuda_tensors():
    with fake_cuda():
        parameters = {name: torch.empty(2, *shape, device="cuda") for name, shape in shapes(CONFIG).items()}
        tokens_RBL = torch.zeros(2, 3, 9, dtype=torch.int64, device="cuda")
        log_prob, entropy = response_log_probs(parameters, CONFIG, tokens_RBL, 4, entropy=True)
        assert entropy is not None
        assert log_prob.device.type == entropy.device.type == "cuda"
        assert log_prob.shape == (2, 3, 5)


def test_autocast_computes_the_same_in_bfloat16_roughly():
    parameters = {name: value.float().requires_grad_(True) for name, value in policies(2).items()}
    tokens_RBL, length_RB = rows_of(2)
    exact, _ = response_log_probs(parameters, CONFIG, tokens_RBL, PROMPT, length_RB)
    with torch.autocast("cpu", torch.bfloat16):
        rough, _ = response_log_probs(parameters, CONFIG, tokens_RBL, PROMPT, length_RB)
    rough.sum().backward()
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, exact, rtol=0, atol=0.1)
    assert not torch.equal(rough, exact)
    assert all(value.grad is not None and value.grad.dtype == torch.float32 for value in parameters.values())
