import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_train.algorithms.losses import weighted_sum
from agent_train.algorithms.reductions import MODES, sample_weights

TOKENS = [torch.tensor([4.0]), torch.tensor([1.0, 2.0, 3.0])]


def weights(mode, tokens, trajectory=None, prompt=None):
    trajectory = list(range(len(tokens))) if trajectory is None else trajectory
    prompt = [0] * len(tokens) if prompt is None else prompt
    length = 3 if mode == "constant" else None
    return sample_weights(mode, torch.tensor(tokens), torch.tensor(trajectory), torch.tensor(prompt), length)


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("token-mean", 2.5),
        ("seq-mean-token-mean", 3.0),
        ("seq-mean-token-sum", 5.0),
        ("constant", 1.666667),
        ("prompt-mean", 2.5),
        ("trajectory-mean", 3.0),
    ],
)
def test_the_numbers_of_two_samples(mode, value):
    weights_R = weights(mode, [1, 3])
    assert sum((x * w).sum() for x, w in zip(TOKENS, weights_R, strict=True)).item() == pytest.approx(value, abs=1e-6)


def test_every_prompt_weighs_the_same_in_the_prompt_mean():
    weights_R = weights("prompt-mean", [1, 3, 6], prompt=[0, 0, 1])
    assert weights_R.tolist() == pytest.approx([1 / 8, 1 / 8, 1 / 12])


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "trajectory-mean"])
def test_rows_of_one_trajectory_share_its_weight(mode):
    tokens = [2, 6, 4]
    weights_R = weights(mode, tokens, trajectory=[7, 7, 9])
    shares = [w * n for w, n in zip(weights_R.tolist(), tokens, strict=True)]
    assert shares[0] + shares[1] == pytest.approx(0.5)
    assert shares[2] == pytest.approx(0.5)
    # Each row alike, or each token alike in whichever row it lies.
    assert shares[0] == pytest.approx(0.25 if mode == "seq-mean-token-mean" else 0.125)


def test_a_sum_over_tokens_does_not_see_how_they_lie_in_rows():
    assert weights("seq-mean-token-sum", [2, 6, 4], trajectory=[7, 7, 9]).tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("mode", MODES)
def test_a_row_without_sampled_tokens_weighs_nothing_and_changes_nothing(mode):
    with_empty = weights(mode, [1, 0, 3], trajectory=[0, 1, 2], prompt=[0, 5, 0])
    assert with_empty[1] == 0
    assert with_empty[[0, 2]].tolist() == weights(mode, [1, 3]).tolist()


ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(ROWS.filter(lambda rows: any(n for n, _, _ in rows)), st.sampled_from(sorted(MODES)), st.randoms())
def test_micro_batches_and_their_order_do_not_change_loss_or_gradient(rows, mode, random):
    tokens, trajectory, prompt = zip(*((n, 10 * p + t, p) for n, t, p in rows), strict=True)
    weights_R = weights(mode, list(tokens), list(trajectory), list(prompt))
    values = [torch.randn(n, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(tokens)]

    def loss_and_grads(parts):
        leaves = [v.clone().requires_grad_() for v in values]
        total = torch.zeros(())
        for part in parts:
            x_T = torch.cat([leaves[i].exp() for i in part])
            w_T = torch.cat([weights_R[i].expand(tokens[i]) for i in part])
            loss = weighted_sum(x_T, w_T, torch.ones(len(x_T), dtype=torch.bool))
            loss.backward()
            total = total + loss.detach()
        return total, torch.cat([x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves])

    whole = loss_and_grads([list(range(len(rows)))])
    for split in (2, 4):
        order = random.sample(range(len(rows)), len(rows))
        parts = [order[i::split] for i in range(split) if order[i::split]]
        loss, grads = loss_and_grads(parts)
        torch.testing.assert_close(loss, whole[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(grads, whole[1], rtol=1e-6, atol=1e-6)
