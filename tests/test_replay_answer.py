"""The sentences above a replay: scale apart from direction, then the layouts; and the screen under them at 80 columns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aggcli.analysis.replay_answer import length_bin, recorded_replay, replay_answer
from aggcli.measurement.catalogue import LENGTH_BINS
from aggcli.measurement.words import percent, short
from tests.cli import Result, aggcli, replay, strict_json, write_jsonl
from tests.fixtures import fx_a, sample

MICRO = "dp1:contiguous,dp1:contiguous:mb2"


@pytest.fixture(autouse=True)
def _80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def answered(told: Result) -> list[str]:
    """The sentences of a `--json`; the records give the same ones."""
    assert told.code in (0, 1), told.err
    sentences = strict_json(told.out)["answer"]
    assert list(replay_answer(*recorded_replay([told.output])).sentences) == sentences
    assert len(sentences) <= 4
    return sentences


def test_scale_is_told_apart_from_direction(capsys, tmp_path: Path) -> None:
    """FX-A: the squared norms are as 1 + 1/3 + 1/4 + 1/8 = 41/24 under sample_mean and 4/4^2 + 12/12^2 = 1/3 under prompt_mean:
    sqrt(8/41) = 0.4417 = 2/4 of P/N times 0.8835. The two correct, of 1 and 4 tokens, get (1/4 + 4/12) / 2 =
    29.2 % instead of half, the largest gap: the 8 tokens above 6 get 1/3 instead of 1/4, the first 1/8 instead of 1/4."""
    said = answered(replay(capsys, tmp_path, fx_a(), "--modes", "sample_mean,prompt_mean", "--json"))
    assert said[0] == "prompt_mean: gradient norm 0.442x sample_mean's."
    assert said[1] == (
        "0.5x is its total weight (0.5 against 1: P/N by definition, 2 prompts"
        " over 4 rollouts; --prompt-mean-scale prompts makes it 1) and the other 0.883x comes from where the weight goes"
        " (cosine 0.883); correct rollouts get 29.2 % of the weight instead of 50 %."
    )


def test_the_mode_that_differs_most_comes_first_and_the_others_in_short(capsys, tmp_path: Path) -> None:
    """Under token_mean the norm is sqrt(24/41) = 0.7651 of sample_mean's, and so is the cosine; constant is 16/40 of that."""
    told = replay(capsys, tmp_path, fx_a(), "--loss-aggregation-divisor", 10, "--json")
    said = answered(told)
    assert said[0] == "constant: gradient norm 0.306x sample_mean's."
    assert said[1].startswith(
        "0.4x is its total weight (0.4 against 1: trained tokens over N x L by"
        " definition; --loss-aggregation-divisor sets L, here 10 tokens) and the other 0.765x comes from where the weight goes"
        " (cosine 0.765); responses of more than 6 tokens get 50 % of the weight instead of 25 %"
    )
    assert said[2] == (
        "The others: prompt_mean 0.442x (total weight 0.5x, cosine 0.883), token_mean 0.765x (total weight 1x, cosine 0.765)."
    )


def test_the_strict_mean_over_prompts_leaves_direction_alone(capsys, tmp_path: Path) -> None:
    flags = ("--modes", "sample_mean,prompt_mean", "--prompt-mean-scale", "prompts", "--json")
    said = answered(replay(capsys, tmp_path, fx_a(), *flags))
    assert said[0] == "prompt_mean: gradient norm 0.883x sample_mean's."
    assert said[1].startswith("Its total weight is the same, so this comes from where the weight goes (cosine 0.883)")


def test_steps_of_different_scale_are_not_multiplied(capsys, tmp_path: Path) -> None:
    """Step 0 is FX-A, 2 prompts over 4; step 1 one prompt of its 4 rollouts: P/N is 1/2 and 1/4, 3/8 in the mean. In step 1 the
    pooled 16 tokens are token_mean's, whose norm at equal total weight is 0.7651; the mean with 0.8835 is 0.8243."""
    one = [{**line, "group_index": 0} for line in fx_a()]
    files = [write_jsonl(tmp_path / f"{at}.jsonl", lines) for at, lines in enumerate((fx_a(), one))]
    told = replay(capsys, tmp_path, tmp_path, "--modes", "sample_mean,prompt_mean", "--json")
    assert len(files) == 2
    said = answered(told)
    assert said[0] == "prompt_mean: gradient norm 0.316x sample_mean's (0.191x to 0.442x) (mean of 2 steps)."
    assert said[1].startswith("Its total weight is 0.375x (0.375 against 1: P/N by definition, prompts over rollouts;")
    assert "at equal total weight the norm would be 0.824x (cosine 0.824)" in said[1]
    assert "the other" not in said[1]


def test_where_the_modes_agree_it_says_so_and_why(capsys, tmp_path: Path) -> None:
    """Four responses of 3 tokens: every token has the weight 1/12, and constant's 1/(4*6) is half of it."""
    lines = [sample(3, group_index=at // 2, reward=at % 2) for at in range(4)]
    said = answered(replay(capsys, tmp_path, lines, "--modes", "sample_mean,token_mean", "--json"))
    assert said[0] == (
        "No difference between the modes here: token_mean has the same gradient, total weight and shares of the weight as"
        " sample_mean, because every trained token weighs the same under each of them."
    )
    flags = ("--modes", "sample_mean,constant,token_mean", "--loss-aggregation-divisor", 6, "--json")
    said = answered(replay(capsys, tmp_path, lines, *flags))
    assert said[0] == "constant: gradient norm 0.5x sample_mean's."
    assert said[1] == (
        "All of it is its total weight (0.5 against 1: trained tokens over N x L by"
        " definition; --loss-aggregation-divisor sets L, here 6 tokens), and the direction is the same (cosine 1)."
    )
    assert said[2].startswith("token_mean has the same gradient")


def test_one_rollout_a_prompt_makes_prompt_mean_the_sample_mean(capsys, tmp_path: Path) -> None:
    lines = [sample(n, group_index=n, advantage=(-1) ** n) for n in (1, 2, 5)]
    said = answered(replay(capsys, tmp_path, lines, "--modes", "sample_mean,prompt_mean", "--json"))
    assert said[0].endswith("as sample_mean, because every prompt has one rollout.")


def test_a_batch_without_a_signal_is_said_to_have_none(capsys, tmp_path: Path) -> None:
    lines = [sample(n, group_index=n // 3, reward=1) for n in range(1, 5)]
    said = answered(replay(capsys, tmp_path, lines, "--modes", "sample_mean,token_mean", "--json"))
    assert said[0] == (
        "The gradient is 0 under sample_mean and token_mean (every advantage is 0 in all 2 prompt groups: rewards are equal, or"
        " it has one rollout): no mode does anything to this batch."
    )


def test_without_rewards_only_the_weights_are_compared(capsys, tmp_path: Path) -> None:
    lines = [sample(n, group_index=0) for n in (1, 3, 4, 8)]
    said = answered(replay(capsys, tmp_path, lines, "--modes", "sample_mean,token_mean", "--json"))
    assert said[0] == "token_mean: total weight 1x sample_mean's; there is no gradient to compare."
    assert said[1] == "Responses of more than 6 tokens get 50 % of the weight instead of 25 %."
    assert (
        said[2]
        == "There is no pg_loss to compare the layouts by (dp1:first-fit, dp2:interleaved, dp2:contiguous, dp4:balanced)."
    )


def test_a_kl_term_has_weights_of_its_own_so_the_norm_is_not_split(capsys, tmp_path: Path) -> None:
    flags = ("--modes", "sample_mean,prompt_mean", "--kl-coef", 0.1, "--json")
    (_, first, *_) = answered(replay(capsys, tmp_path, fx_a(), *flags))
    assert first.startswith("Cosine 0.")
    assert "(both of the loss with its KL term), total weight 0.5x (" in first
    assert "entropy" not in first
    assert "comes from" not in first
    assert "total weight 0.5x" in first


def test_where_the_kl_term_alone_is_left_nothing_is_said_of_the_weight_on_advantages(capsys, tmp_path: Path) -> None:
    """Equal rewards: nothing but the KL term has a gradient."""
    lines = [{**line, "advantage": 0.0, "reward": 1.0} for line in fx_a()]
    flags = ("--modes", "sample_mean,constant,token_mean", "--kl-coef", 0.1, "--json")
    (first, second, others, *_) = answered(replay(capsys, tmp_path, lines, *flags))
    assert re.fullmatch(r"token_mean: gradient norm [\d.]+x sample_mean's\.", first)
    assert re.fullmatch(r"Cosine [\d.]+, both of the KL term alone, as every advantage is 0\.", second)
    assert others == "The others: constant 1x (cosine 1).", "its KL term is weighted as sample_mean's is"


def test_without_a_gradient_the_effective_sample_size_says_that_weights_differ(capsys, tmp_path: Path) -> None:
    """1, 3, 4 and 8 tokens over 4 x 10: 0.4, and 16 under token_mean; 1 / ((1 + 1/3 + 1/4 + 1/8) / 16) = 384/41 = 9.37."""
    lines = [sample(n, group_index=0) for n in (1, 3, 4, 8)]
    flags = ("--modes", "sample_mean,constant,token_mean", "--loss-aggregation-divisor", 10, "--json")
    said = answered(replay(capsys, tmp_path, lines, *flags))
    assert said[0] == "constant: total weight 0.4x sample_mean's; there is no gradient to compare."
    assert said[1].startswith(
        "0.4 against 1: trained tokens over N x L by definition; --loss-aggregation-divisor sets L, here 10 tokens; responses"
    )
    assert said[2] == "The others: token_mean (total weight 1x, effective sample size 16 instead of 9.37 tokens)."


@pytest.mark.parametrize(
    ("most", "words"),
    [
        (2, ["", "1 token", "", "more than 1 token"]),
        (3, ["", "1 token", "2 tokens", "more than 2 tokens"]),
        (4, ["1 token", "2 tokens", "3 tokens", "more than 3 tokens"]),
        (10, ["at most 2 tokens", "3 to 5 tokens", "6 to 7 tokens", "more than 7 tokens"]),
    ],
)
def test_quarters_of_a_short_maximum_are_named_in_whole_lengths(most: int, words: list[str]) -> None:
    head = {"max_response_length": most, "length_unit": "tokens"}
    assert [length_bin(bin_, head) for bin_ in LENGTH_BINS] == words


def test_rows_of_quarters_that_no_length_lies_in_are_left_out(capsys, tmp_path: Path) -> None:
    """Lengths 1 and 2 of at most 2: the quarters up to 0.5 and 1.5 hold no whole length of their own."""
    lines = [sample(n, group_index=0, reward=n - 1) for n in (1, 2)]
    out = replay(capsys, tmp_path, lines, "--modes", "sample_mean,token_mean").out
    assert "  1 token " in out
    assert "  more than 1 token " in out
    assert not re.search(r"\b0 tokens|\b1 tokens|2 to 1|empty", out)


def test_one_mode_is_said_to_stand_alone(capsys, tmp_path: Path) -> None:
    """The norm under sample_mean is 0.5/4 * sqrt(41/24) = 0.1634."""
    said = answered(replay(capsys, tmp_path, fx_a(), "--json", command="run"))
    assert said[0] == (
        "sample_mean alone: pg_loss 0, gradient norm 0.163, total weight 1, responses of more than 6 tokens get 25 % of the"
        " weight; `aggcli compare` sets it beside other modes."
    )


def test_lengths_in_characters_are_not_called_tokens(capsys, tmp_path: Path) -> None:
    prompt, right, wrong = "1+1", "two", "it is eleven"
    rows = [{"input": prompt, "output": text, "score": score, "step": 1} for text, score in ((right, 1.0), (wrong, 0.0))]
    folder = tmp_path / "verl"
    folder.mkdir()
    write_jsonl(folder / "1.jsonl", rows)
    said = answered(replay(capsys, tmp_path, folder, "--modes", "sample_mean,token_mean", "--json"))
    assert "responses of more than 9 characters get 80 % of the weight instead of 50 %" in said[1]
    assert not any("tokens" in one for one in said[:2])


# -- layouts ----------------------------------------------------------------------------------------------------------


def test_a_rule_that_depends_on_the_layout_is_named_with_what_the_layout_makes_of_it(capsys, tmp_path: Path) -> None:
    """FX-A: over all 16 tokens the loss is 3/16 = 0.1875. In micro-batches of two, of 4 and 12 tokens: (2/8 + 4/24) / 2 =
    0.2083, 11.1 % more."""
    flags = ("--modes", "sample_mean,trl:bnpo", "--layouts", MICRO, "--json")
    said = answered(replay(capsys, tmp_path, fx_a(), *flags))
    assert said[-1].startswith(
        f"Under trl:bnpo the loss depends on the layout: of the layouts evaluated ({MICRO.replace(',', ', ')})"
        " dp1:contiguous:mb2 gives a pg_loss of 0.2083 instead of 0.1875 under dp1:contiguous (11.1 %); under sample_mean none"
        " changes it ("
    )
    assert "under dp1:contiguous)" in said[0]


def test_what_is_the_same_under_one_layout_alone_is_said_of_that_layout(capsys, tmp_path: Path) -> None:
    """FX-A over all 16 tokens in dp1: trl:bnpo is token_mean there, and 0.2083 instead of 0.1875 in micro-batches of two."""
    flags = ("--modes", "token_mean,trl:bnpo", "--layouts", MICRO, "--json")
    said = answered(replay(capsys, tmp_path, fx_a(), *flags))
    assert said[0].startswith("Under dp1:contiguous trl:bnpo has the same gradient, total weight and shares of the weight as")
    assert said[1].startswith("Under trl:bnpo the loss depends on the layout")
    flags = ("--modes", "token_mean,constant,trl:bnpo", "--layouts", MICRO, "--loss-aggregation-divisor", 4, "--json")
    said = answered(replay(capsys, tmp_path, fx_a(), *flags))
    assert said[0].startswith("constant has the same gradient, ")
    assert "; under dp1:contiguous trl:bnpo has the same gradient, " in said[0]
    assert not any("No difference" in one for one in said)


def test_every_number_of_the_sentence_is_of_the_steps_that_have_a_gradient(capsys, tmp_path: Path) -> None:
    """Step 0, of equal rewards: 8 tokens over 4 x 10, a total weight of 0.2. Step 1 is FX-A, 16 over 40: 0.4 times 0.7651
    is the norm, and the 8 tokens of the longest get one half instead of a quarter. token_mean has the rest without the 0.4."""
    write_jsonl(tmp_path / "0.jsonl", [sample(2, group_index=0, reward=1) for _ in range(4)])
    write_jsonl(tmp_path / "1.jsonl", fx_a())
    flags = ("--modes", "sample_mean,constant,token_mean", "--loss-aggregation-divisor", 10, "--max-response-length", 8)
    said = answered(replay(capsys, tmp_path, tmp_path, *flags, "--json"))
    assert said[0] == "constant: gradient norm 0.306x sample_mean's (mean of the 1 of 2 steps with a gradient)."
    assert said[1].startswith(
        "0.4x is its total weight (0.4 against 1: trained tokens over N x L by definition; --loss-aggregation-divisor sets L,"
        " here 10 tokens) and the other 0.765x comes from where the weight goes (cosine 0.765); responses of "
    )
    assert said[1].endswith("responses of more than 6 tokens get 50 % of the weight instead of 25 %.")
    assert said[2] == "The others: token_mean 0.765x (total weight 1x, cosine 0.765)."


def test_layouts_that_change_nothing_are_named_and_so_is_a_single_one(capsys, tmp_path: Path) -> None:
    said = answered(replay(capsys, tmp_path, fx_a(), "--layouts", "dp1,dp2:contiguous", "--json"))
    assert said[-1].startswith(
        "None of the layouts evaluated (dp1, dp2:contiguous) changes the loss under any of these modes ("
    )
    assert said[-1].endswith((", as rounding in float64 is).", "(equal to the last bit)."))
    said = answered(replay(capsys, tmp_path, fx_a(), "--layouts", "dp2", "--json"))
    assert said[-1] == "Only the layout dp2 was evaluated, so nothing is said of others (--layouts names them)."


def test_a_layout_that_changes_what_none_may_change_is_called_a_fault() -> None:
    """Records of a fault: 0.25 under one layout and 0.5 under another, of absolute terms of 1."""

    def of(loss: float) -> dict:
        return {"pg_loss": loss, "sizes": {"pg_loss": 1.0}}

    values = {
        "tokens": 4,
        "total_weight": 1.0,
        "pg_loss": 0.25,
        "grad_norm_log_probs": 1.0,
        "layouts": {"dp1": of(0.25), "dp2": of(0.5)},
    }
    head = {"modes": ["sample_mean"], "settings": {"dtype": None}, "length_unit": "tokens", "max_response_length": 4}
    said = replay_answer(head, [{"step": 7, "modes": {"sample_mean": values}, "layout_deviation": 0.25}]).sentences
    assert said[-1] == (
        "Under sample_mean the loss depends on the layout (a fault: none may under sample_mean): of the layouts evaluated (dp1,"
        " dp2) dp2 gives a pg_loss of 0.5 instead of 0.25 under dp1 (100 %)."
    )


@pytest.mark.parametrize(("moved", "said"), [(0.0, ""), (2.0**-54, "1e-15"), (2.0**-49, "2e-15"), (2.1e-10, "3e-10")])
def test_what_layouts_are_apart_at_most_is_never_said_too_small(moved: float, said: str) -> None:
    """Of absolute terms of 1: 2^-54 is 6e-17, which another processor may make 5e-17; 2^-49 is 1.8e-15."""
    layouts = {name: {"pg_loss": loss, "sizes": {"pg_loss": 1.0}} for name, loss in (("dp1", 0.25), ("dp2", 0.25 + moved))}
    values = {"tokens": 4, "total_weight": 1.0, "pg_loss": 0.25, "grad_norm_log_probs": 1.0, "layouts": layouts}
    head = {"modes": ["sample_mean"], "settings": {"dtype": None}, "length_unit": "tokens", "max_response_length": 4}
    answer = replay_answer(head, [{"step": 7, "modes": {"sample_mean": values}, "layout_deviation": moved}]).sentences[-1]
    how = f"apart by at most {said} of its absolute terms, as rounding in float64 is" if moved else "equal to the last bit"
    assert answer == f"None of the layouts evaluated (dp1, dp2) changes the loss under sample_mean ({how})."


# -- of its directory -------------------------------------------------------------------------------------------------


def test_the_directory_of_a_replay_answers_as_the_replay_did(capsys, tmp_path: Path) -> None:
    told = replay(capsys, tmp_path, fx_a(), "--json")
    said = answered(told)
    assert len(said) == 4
    compared = strict_json(aggcli(capsys, "compare", told.output, "--json").out)
    assert compared["answer"] == said
    screen = " ".join(aggcli(capsys, "compare", told.output).out.split())
    assert screen.startswith(" ".join(said))
    assert screen.index("can change them") > screen.index("weight on correct"), "what cannot be shown stands below the table"


def test_what_is_no_replay_of_each_mode_once_has_no_answer_of_one(capsys, tmp_path: Path) -> None:
    """Its cosines are to its own first mode, and what a setting changes is not the mode's doing."""
    dump = write_jsonl(tmp_path / "dump.jsonl", fx_a())
    out, other = replay(capsys, tmp_path, dump).output, replay(capsys, tmp_path, dump, "--eps-clip", 0.1).output
    for flags in ((out, "--baseline", "constant"), (out / "constant", out / "sample_mean")):
        compared = strict_json(aggcli(capsys, "compare", *flags, "--json").out)
        assert re.match(r"[24] replays of the same recorded rollouts: constant(,| and) sample_mean", compared["answer"][0])
    compared = strict_json(aggcli(capsys, "compare", out, other, "--json").out)
    assert compared["answer"][0].startswith("8 replays of the same recorded rollouts: sample_mean (eps_clip=0.2), prompt_mean")
    cosines = {row["mode"] for row in compared["outcomes"] if row["outcome"] == "gradient_cosine"}
    assert cosines == {f"{mode} (eps_clip=0.2)" for mode in ("sample_mean", "prompt_mean", "token_mean", "constant")}
    compared = strict_json(aggcli(capsys, "compare", out / "sample_mean", other / "constant", "--json").out)
    assert compared["answer"][0] == "2 replays of the same recorded rollouts: sample_mean and constant."


# -- the screen -------------------------------------------------------------------------------------------------------


def test_the_answer_stands_first_and_the_notes_and_settings_last(capsys, tmp_path: Path) -> None:
    told = replay(capsys, tmp_path, fx_a(), "--modes", "sample_mean,token_mean")
    lines = told.out.splitlines()
    assert lines[0].startswith("token_mean: gradient norm 0.765x sample_mean's.")
    heads = [at for at, line in enumerate(lines) if line.startswith(("step 0", "where the weight goes", "mode: "))]
    assert heads == sorted(heads)
    assert len(heads) == 3
    assert max(map(len, lines)) <= 80


def test_modes_whose_numbers_are_all_equal_share_a_column(capsys, tmp_path: Path) -> None:
    """token_mean and constant weigh tokens alike but for a factor: one column where the weight goes, two where the loss is; a
    rule that depends on the layout keeps its own."""
    flags = ("--modes", "sample_mean,token_mean,constant,trl:bnpo", "--loss-aggregation-divisor", 10, "--layouts", "dp1")
    text = replay(capsys, tmp_path, fx_a(), *flags).out
    scale, direction = text.split("\n\n")[1:3]
    assert "= constant" not in scale
    assert "= constant" in direction
    assert "= trl:bnpo" not in text
    row = next(line for line in direction.splitlines() if line.startswith("gradient cosine"))
    assert row.split()[2:] == ["1", "0.765", "0.765"]


def test_the_screen_says_what_the_gradient_is_by_where_there_is_one(capsys, tmp_path: Path) -> None:
    said = "\ngradient norm, cosine: of the gradient by the trained tokens' log-probabilities\n"
    assert said in replay(capsys, tmp_path, fx_a(), "--modes", "sample_mean,token_mean").out
    lengths = [sample(n, group_index=0) for n in (1, 3)]
    assert said.strip() not in replay(capsys, tmp_path, lengths, "--modes", "sample_mean,token_mean").out


def test_a_note_that_differs_from_step_to_step_in_numbers_alone_is_said_once(capsys, tmp_path: Path) -> None:
    for step, silent in enumerate((1, 2)):
        lines = [sample(2, group_index=group, reward=float(group >= silent and at)) for group in range(3) for at in range(2)]
        write_jsonl(tmp_path / f"{step}.jsonl", lines)
    told = replay(capsys, tmp_path, tmp_path)
    (said,) = [line for line in told.err.splitlines() if "zero-variance" in line]
    assert said == ("note: zero-variance groups 1/3: every advantage in them is 0 (step 0; other steps have other numbers)")
    assert told.out


def test_a_note_of_one_step_names_its_file(capsys, tmp_path: Path) -> None:
    streams = {"log_probs": [-1.0, -1.0], "rollout_log_probs": [-1.0, -1.0]}
    for step in range(2):
        own = {"old_log_probs": [-1.0, -1.0]} if step == 0 else {}
        write_jsonl(tmp_path / f"{step}.jsonl", [{"response_length": 2, "advantage": 1.0, **streams, **own}] * 2)
    missing = "old_log_probs are missing: rollout_log_probs are taken as the policy that sampled"
    told = replay(capsys, tmp_path, f"{tmp_path}/[01].jsonl")
    assert f"note: step 1 (1.jsonl): {missing}" in told.err
    assert "sampler mismatch of a response: size of its sum (nats)" in told.out
    (tmp_path / "0.jsonl").write_text((tmp_path / "0.jsonl").read_text() * 2)
    told = replay(capsys, tmp_path, f"{tmp_path}/[01].jsonl", "--global-batch-size", 2)
    assert f"note: step 2, of step 1 (1.jsonl): {missing}" in told.err


def test_dynamic_sampling_and_masked_truncation_leave_a_line_in_the_table(capsys, tmp_path: Path) -> None:
    """Of three groups one has equal rewards; of the four samples left one is truncated: a quarter."""
    rewards = ((0, 0), (0, 1), (1, 0))
    lines = [
        sample(2, group_index=group, reward=reward, status="truncated" if (group, at) == (2, 0) else "completed")
        for group, pair in enumerate(rewards)
        for at, reward in enumerate(pair)
    ]
    told = replay(capsys, tmp_path, lines, "--drop-zero-variance", "--mask-truncated")
    rows = [re.sub(r"\s{2,}", "|", line.strip()) for line in told.out.splitlines()]
    assert "prompt groups before --drop-zero-variance|3" in rows
    assert "prompt groups left by it|2" in rows
    assert "truncated responses, masked by --mask-truncated|25 %" in rows
    assert "fully masked samples|1" in rows


def test_numbers_that_are_equal_but_for_rounding_read_alike() -> None:
    """5/16 is 31.25 %: halfway, and rounding of a sum puts it on either side."""
    assert {percent(share) for share in (5 / 16, 5 / 16 + 1e-16, 5 / 16 - 1e-16)} == {"31.2 %"}
    assert short(0.3125 + 1e-15) == short(0.3125) == "0.312"
