"""`rl.data.steps`: pairing against a naive walk over episodes, and every way a log can be bad."""

import contextlib
import warnings

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.data.steps import MAX_ACTIONS, DataError, digest, from_steps, loaded, reference
from rl.replay.dataset import Dataset
from rl.types import Transition


def naive(observations, actions, rewards, terminals, timeouts, next_observations):
    """One transition after another, as the docstring of `Transition` and of `from_steps` has it."""
    rows, last, n = [], [], len(rewards)
    for t in range(n):
        ends = terminals[t] or timeouts[t] or t == n - 1
        if next_observations is not None:
            jump = t < n - 1 and not np.array_equal(next_observations[t], observations[t + 1])
            ends = ends or jump
            successor, is_last = next_observations[t], ends
        elif terminals[t]:
            successor, is_last = observations[t], True
        elif ends:
            continue
        else:
            successor = observations[t + 1]
            cut_next = timeouts[t + 1] or t + 1 == n - 1
            is_last = cut_next and not terminals[t + 1]
        next_action = actions[t] if ends else actions[t + 1]
        rows.append(
            (observations[t], actions[t], rewards[t], 1.0 - terminals[t], successor, next_action, not ends)
        )
        last.append(is_last)
    return rows, last


@st.composite
def logs(draw):
    """Episodes of 1 to 6 steps, each ended by a terminal, a timeout or (the last one) by nothing."""
    endings = draw(st.lists(st.tuples(st.integers(1, 6), st.sampled_from("tlb")), min_size=1, max_size=6))
    endings += draw(st.sampled_from([[], [(1, "-")], [(3, "-")]]))
    terminals, timeouts = [], []
    for length, kind in endings:
        terminals += [False] * (length - 1) + [kind in "tb"]
        timeouts += [False] * (length - 1) + [kind in "lb"]
    discrete = draw(st.booleans())
    return np.array(terminals), np.array(timeouts), discrete, draw(st.booleans())


@settings(deadline=None, max_examples=300)
@given(logs())
@pytest.mark.slow
def test_pairs_like_a_walk_over_the_episodes(log):
    terminals, timeouts, discrete, with_next = log
    n = len(terminals)
    rng = np.random.default_rng(n)
    observations = rng.normal(size=(n, 3)).astype(np.float32)
    actions = rng.integers(0, 4, n) if discrete else rng.uniform(-1, 1, (n, 2)).astype(np.float32)
    rewards = rng.normal(size=n).astype(np.float32)
    successors = None
    if with_next:
        successors = np.roll(observations, -1, axis=0)
        ends = terminals | timeouts
        successors[ends] = rng.normal(size=(ends.sum(), 3)).astype(np.float32)
    rows, last = naive(observations, actions, rewards, terminals, timeouts, successors)
    if not rows:
        with pytest.raises(DataError, match="single step that nothing follows"):
            from_steps(observations, actions, rewards, terminals, timeouts, source="log", discrete=discrete)
        return
    dataset = from_steps(
        observations, actions, rewards, terminals, timeouts, successors, source="log", discrete=discrete
    )
    *columns, origin = dataset.transitions
    assert origin is None
    for actual, expected in zip(columns, zip(*rows, strict=True), strict=True):
        np.testing.assert_array_equal(actual, np.array(expected))
    np.testing.assert_array_equal(dataset.last, last)
    assert dataset.transitions.action.dtype == (np.int32 if discrete else np.float32)
    fields = dict(zip(Transition._fields, columns, strict=False))
    assert all(x.dtype == np.float32 for name, x in fields.items() if "action" not in name)


def episodes(lengths, final_terminal=False):
    """A log whose observations are (episode, step), so that a pairing across episodes shows."""
    observations = np.array([(e, t) for e, length in enumerate(lengths) for t in range(length)], np.float32)
    ends = np.cumsum(lengths) - 1
    timeouts = np.zeros(len(observations), bool)
    timeouts[ends] = True
    return {
        "observations": observations,
        "actions": np.full((len(observations), 2), 0.5, np.float32),
        "rewards": np.arange(len(observations), dtype=np.float32),
        "terminals": np.zeros(len(observations), bool),
        "timeouts": timeouts,
    }


def test_no_pair_crosses_an_episode_end():
    transitions = from_steps(**episodes([4, 1, 3]), source="log").transitions
    np.testing.assert_array_equal(transitions.observation[:, 0], transitions.next_observation[:, 0])
    np.testing.assert_array_equal(transitions.observation[:, 1] + 1, transitions.next_observation[:, 1])
    assert len(transitions.reward) == 3 + 0 + 2


def test_a_time_limit_is_no_termination_and_a_terminal_is():
    log = episodes([3, 3])
    log["terminals"][5] = True
    dataset = from_steps(**log, source="log")
    np.testing.assert_array_equal(dataset.transitions.discount, [1, 1, 1, 1, 0])
    np.testing.assert_array_equal(dataset.transitions.has_next_action, [1, 1, 1, 1, 0])
    np.testing.assert_array_equal(dataset.last, [0, 1, 0, 0, 1])


def test_unmarked_resets_are_found_where_next_observations_are_given():
    log = episodes([3, 3, 3])
    log["next_observations"] = log["observations"] + [0, 1]
    log["timeouts"][2] = False
    dataset = from_steps(**log, source="log")
    np.testing.assert_array_equal(dataset.transitions.has_next_action, [1, 1, 0] * 3)
    np.testing.assert_array_equal(dataset.last, [0, 0, 1] * 3)
    np.testing.assert_array_equal(dataset.transitions.discount, np.ones(9))


def chained(n):
    """``n`` steps with next observations, the last of each ten marked as cut."""
    observations = np.arange(n, dtype=np.float32)[:, None]
    return {
        "observations": observations,
        "actions": np.zeros((n, 1), np.float32),
        "rewards": np.zeros(n, np.float32),
        "terminals": np.zeros(n, bool),
        "timeouts": np.arange(n) % 10 == 9,
        "next_observations": observations + 1,
    }


def test_next_observations_that_do_not_follow_are_refused_unless_the_log_is_said_to_be_shuffled():
    """And then every step is an episode of its own, where it would be one without a word."""
    order = np.random.default_rng(0).permutation(1000)
    log = {name: array[order] for name, array in chained(1000).items()}
    with pytest.raises(
        DataError, match=r"for (89\d|90\d) of 999 steps next_observations .*--shuffled \(shuffled=True\)"
    ):
        from_steps(**log, source="mine")
    dataset = from_steps(**log, source="mine", shuffled=True)
    assert dataset.last.mean() > 0.99
    np.testing.assert_array_equal(dataset.transitions.next_observation, log["next_observations"])
    with pytest.raises(
        DataError, match=r"mine: without next_observations, .* no successors.*leave out --shuffled"
    ):
        from_steps(**log | {"next_observations": None}, source="mine", shuffled=True)


def test_rows_of_environments_side_by_side_are_told_from_other_disorder():
    order = np.arange(1000).reshape(4, 250).T.reshape(-1)
    log = {name: array[order] for name, array in chained(1000).items()}
    with pytest.raises(DataError, match="steps later: the rows of 4 environments stand side by side"):
        from_steps(**log, source="mine")
    # Of dictionaries all entries must say so: a goal that never changes follows any other row.
    order = np.random.default_rng(0).permutation(1000)
    log = {name: array[order] for name, array in chained(1000).items()}
    for name in ("observations", "next_observations"):
        log[name] = {"desired_goal": np.zeros((1000, 1), np.float32), "observation": log[name]}
    with pytest.raises(DataError, match="If the steps are in order, next_observations are wrong"):
        from_steps(**log, source="mine")


def test_a_tenth_of_the_steps_may_end_unmarked():
    """With a warning if these are most ends, as where rows were lost: returns are then of parts of episodes."""
    log = chained(200)
    resets = np.arange(2, 190, 10)
    log["next_observations"][resets] = -1
    assert from_steps(**log, source="mine").last.sum() == 20 + 19
    kept = np.random.default_rng(0).random(1000) > 0.05
    long = chained(1000) | {"timeouts": np.arange(1000) == 999}
    with pytest.warns(UserWarning, match=r"mine: at \d+ steps next_observations are not what .* \(1 are\)"):
        from_steps(**{name: array[kept] for name, array in long.items()}, source="mine")
    log["next_observations"][4] = -1
    with pytest.raises(DataError, match=r"for 20 of 199 steps .*the first is step 2"):
        from_steps(**log, source="mine")


def test_rewards_of_last_steps_that_are_left_out_are_missed():
    """Sessions that are rated at their ends, where they are cut."""
    log = episodes([10] * 20)
    log["rewards"] = np.tile(np.eye(10)[9], 20)
    with pytest.warns(
        UserWarning, match="the last steps of 20 episodes .* and with them 100% of all rewards"
    ):
        from_steps(**log, source="mine")
    log["rewards"] = np.ones(200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_steps(**log, source="mine")


def test_numbers_that_float32_cannot_tell_apart_are_warned_of():
    log = episodes([100])
    noise = np.random.default_rng(0).normal(size=(100, 2))
    with pytest.warns(
        UserWarning, match=r"rounds 1 of their 2 numbers .* number 1 has 5.4e\+06 .* deviation of"
    ):
        from_steps(**log | {"observations": noise + np.array([1.0, 5.4e6])}, source="mine")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_steps(
            **log | {"observations": noise * np.array([1.0, 0.0]) + np.array([1e3, 5.4e6])}, source="mine"
        )


def test_rounding_is_no_reset():
    log = episodes([3, 3])
    log["next_observations"] = log["observations"] + np.array([1e-7, 1 + 1e-7], np.float32)
    np.testing.assert_array_equal(from_steps(**log, source="log").last, [0, 0, 1] * 2)


def test_a_log_cut_by_a_size_limit_ends_like_a_time_limit():
    log = episodes([3, 4])
    log["timeouts"][-1] = False
    dataset = from_steps(**log, source="log")
    np.testing.assert_array_equal(dataset.last, [0, 1, 0, 0, 1])
    np.testing.assert_array_equal(dataset.transitions.discount, np.ones(5))


def test_discounts_may_stop_a_backup_inside_an_episode():
    dataset = from_steps(**episodes([4]), source="log", discounts=np.array([1, 0, 1, 1]))
    np.testing.assert_array_equal(dataset.transitions.discount, [1, 0, 1])
    np.testing.assert_array_equal(dataset.transitions.has_next_action, [1, 1, 1])


def test_actions_are_mapped_from_their_box():
    log = episodes([4])
    log["actions"] = np.array([[-2, 0], [2, 10], [0, 5], [1, 2.5]], np.float64)
    actions = from_steps(**log, source="log", low=[-2, 0], high=[2, 10]).transitions.action
    np.testing.assert_allclose(actions, [[-1, -1], [1, 1], [0, 0]])
    assert np.abs(actions).max() <= 1


def test_actions_in_the_unit_box_keep_their_bits():
    log = episodes([50])
    log["actions"] = np.random.default_rng(0).uniform(-1, 1, (50, 2)).astype(np.float32)
    np.testing.assert_array_equal(from_steps(**log, source="log").transitions.action, log["actions"][:-1])


def test_rounding_just_outside_the_box_is_clipped_silently():
    log = episodes([3])
    log["actions"][1, 0] = np.float32(1) + np.finfo(np.float32).eps
    assert from_steps(**log, source="log").transitions.action.max() == 1


def test_actions_outside_are_clipped_if_asked():
    log = episodes([3])
    log["actions"][0] = [1.5, -7]
    dataset = from_steps(**log, source="log", actions_outside="clip")
    np.testing.assert_array_equal(dataset.transitions.action[0], [1, -1])


def test_images_stay_bytes_histories_keep_their_axes_and_other_arrays_become_vectors():
    log = episodes([3])
    log["observations"] = np.zeros((3, 4, 4, 3), np.uint8)
    observation = from_steps(**log, source="log").transitions.observation
    assert (observation.dtype, observation.shape) == (np.uint8, (2, 4, 4, 3))
    for shape, seen in (((4, 2), (4, 2)), ((4, 2, 5), (40,))):
        log["observations"] = np.zeros((3, *shape), np.float64)
        warned = f"observations are floats of shape .*, and become vectors of {seen[0]} numbers: .* uint8"
        with pytest.warns(match=warned) if len(seen) == 1 else contextlib.nullcontext():
            dataset = from_steps(**log, source="log")
        observation = dataset.transitions.observation
        assert (observation.dtype, observation.shape) == (np.float32, (2, *seen))
        assert loaded(dataset, environment=None, source="log").spec.observation_shape == seen


@pytest.mark.parametrize("with_next", [False, True])
def test_entries_of_a_dictionary_are_paired_as_one_array_is(with_next):
    """An unmarked reset shows in one entry alone; entries are sorted, floats become vectors and images stay."""
    log = episodes([3, 3, 3])
    log["observations"][:, 1] = np.arange(9)
    log["timeouts"][2] = not with_next
    if with_next:
        log["next_observations"] = log["observations"] + [0, 1]
    plain = from_steps(**log, source="log")
    for name in ("observations", "next_observations") if with_next else ("observations",):
        episode, step = log[name].T
        log[name] = {
            "step": step[:, None].astype(np.float64),
            "inner": {"image": np.uint8(episode)[:, None, None, None]},
        }
    dataset = from_steps(**log, source="log")
    for name in ("observation", "next_observation"):
        expected, actual = getattr(plain.transitions, name), getattr(dataset.transitions, name)
        assert list(actual) == ["inner", "step"] and actual["inner"]["image"].dtype == np.uint8
        np.testing.assert_array_equal(actual["step"], expected[:, 1:])
        np.testing.assert_array_equal(actual["inner"]["image"][:, 0, 0], expected[:, :1])
    np.testing.assert_array_equal(dataset.last, plain.last)
    spec = loaded(dataset, environment=None, source="log").spec
    assert spec == ({"inner": {"image": (1, 1, 1)}, "step": (1,)}, 2, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"observations": {"a": np.zeros((3, 1)), "b": np.zeros((2, 1))}},
            r"observations\['b'\] have shape \(2, 1\)",
        ),
        ({"observations": {"a": np.full((3, 1), np.nan)}}, r"3 values of observations\['a'\] are NaN"),
        (
            {"observations": {"a": np.zeros((3, 1))}, "next_observations": {"b": np.zeros((3, 1))}},
            r"next_observations are {'b': 'float32 \(3, 1\)'}, but observations are {'a': 'float32 \(3, 1\)'}",
        ),
    ],
)
def test_a_bad_entry_of_a_dictionary_is_named(changes, message):
    with pytest.raises(DataError, match=message):
        from_steps(**episodes([3]) | changes, source="log")


def test_columns_of_one_are_accepted():
    log = episodes([3])
    plain = from_steps(**log, source="log")
    for name in ("rewards", "terminals", "timeouts"):
        log[name] = log[name][:, None]
    assert digest(from_steps(**log, source="log")) == digest(plain)


def set_value(name, index, value):
    def change(log):
        log[name] = log[name].astype(np.float64 if np.ndim(value) == 0 else log[name].dtype)
        log[name][index] = value

    return change


def replace(name, value):
    return lambda log: log.update({name: value})


BAD = {
    "unequal lengths": (
        replace("rewards", np.zeros(5, np.float32)),
        r"rewards have shape \(5,\), but there are 7",
    ),
    "unequal actions": (
        replace("actions", np.zeros((8, 2))),
        r"actions have shape \(8, 2\), but there are 7",
    ),
    "unequal flags": (replace("timeouts", np.zeros(6)), r"timeouts have shape \(6,\)"),
    "scalar rewards": (replace("rewards", np.float32(0)), r"rewards have shape \(\)"),
    "wide rewards": (replace("rewards", np.zeros((7, 2))), "one number per step"),
    "empty": (replace("observations", np.zeros((0, 2), np.float32)), "the log has no steps"),
    "no array": (replace("observations", {}), "observations hold no array"),
    "no rows": (replace("observations", np.zeros(7, np.float32)), "one row per step"),
    "text observations": (
        replace("observations", np.full((7, 2), "a")),
        "observations are <U1; save them as float32",
    ),
    "integer observations": (replace("observations", np.zeros((7, 2), np.int64)), "observations are int64"),
    "an image without channels": (
        replace("observations", np.zeros((7, 9, 8), np.uint8)),
        r"observations: uint8 of shape \(9, 8\) is no image \[H, W, C\].*keep_dim=True",
    ),
    "vectors of bytes": (
        replace("observations", {"ram": np.zeros((7, 9), np.uint8)}),
        r"observations\['ram'\] are uint8 vectors, .*: save them as float32, .* divided by 255",
    ),
    "channels first": (
        replace("observations", {"eye": np.zeros((7, 4, 9, 8), np.uint8)}),
        r"observations\['eye'\]: uint8 of shape \(4, 9, 8\) is an image with its channels first",
    ),
    "text rewards": (replace("rewards", np.full(7, "a")), "rewards are <U1"),
    "boolean actions": (replace("actions", np.zeros(7, bool)), "actions are bool; save choices as integers"),
    "integer actions": (replace("actions", np.zeros((7, 2), np.int64)), "discrete=True"),
    "NaN observation": (
        set_value("observations", (3, 1), np.nan),
        "1 values of observations are NaN.* step 3",
    ),
    "two bad actions": (
        lambda log: log["actions"].__setitem__(slice(2, 4), [[np.inf, 0], [0, np.nan]]),
        "2 values of actions are NaN or infinite.* step 2",
    ),
    "infinite reward": (set_value("rewards", 6, -np.inf), "1 values of rewards.* step 6"),
    "beyond float32": (set_value("rewards", 4, 1e300), "1 values of rewards.*float32.* step 4"),
    "NaN next observation": (
        lambda log: log.update(next_observations=np.full((7, 2), np.nan)),
        "14 values of next_observations.* step 0",
    ),
    "other next observation": (
        replace("next_observations", np.zeros((7, 3), np.float32)),
        r"next_observations are float32 \(7, 3\), but observations are float32 \(7, 2\)",
    ),
    "action outside": (
        lambda log: log["actions"].__setitem__(slice(4, 6), [[0, 1.25], [-1.5, 1.1]]),
        r"3 action values in 2 of 7 steps.*worst is -1.5 in step 5, dimension 0.*\[-1, 1\]. If they are in the "
        "environment's own units, .*--clip_actions",
    ),
    "odd terminal": (
        set_value("terminals", 2, 0.5),
        "terminals must be 0 or 1, but 1 are not.* 0.5 in step 2",
    ),
    "actions without width": (
        replace("actions", np.zeros((7, 0), np.float32)),
        r"actions have shape \(7, 0\): not one number",
    ),
    "complex rewards": (replace("rewards", np.zeros(7, complex)), "rewards are complex128"),
    "text terminals": (replace("terminals", np.full(7, "a")), "terminals are <U1"),
    "no end": (replace("timeouts", np.zeros(7, bool)), "no episode ends in 7 steps.*write 'timeouts'"),
    "no end, no flag": (replace("timeouts", None), "no episode ends in 7 steps"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_log_is_refused(case):
    change, message = BAD[case]
    log = episodes([4, 3])
    change(log)
    with pytest.raises(DataError, match=f"mine: .*{message}"):
        from_steps(**log, source="mine")


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (np.zeros(7), "must be integers, but they are float64"),
        (np.zeros(7, bool), "must be integers, but they are bool; save choices as integers"),
        (np.array([0, 1, 2, -1, 0, 0, 0]), "count from 0, but the smallest is -1"),
        (np.zeros((7, 2), int), r"shape \(7, 2\), but one per step"),
        (np.zeros(6, int), r"shape \(6,\), but there are 7"),
        *(
            (
                np.array([0, 1, 2, 3, 0, 0, largest]),
                f"actions are integers up to {largest}, .*at most 65536.*numpy.unique",
            )
            for largest in (2**16, 2**31 - 1, 2**31, 2**40, 2**63 - 1)
        ),
        (np.array([0, 1, 2, 3, 0, 0, 2**64 - 1], np.uint64), "up to 18446744073709551615"),
    ],
)
def test_bad_discrete_actions_are_refused(actions, message):
    with pytest.raises(DataError, match=message):
        from_steps(**{**episodes([4, 3]), "actions": actions}, source="mine", discrete=True)


def test_the_choices_of_the_environment_decide_what_is_0_and_what_is_an_error():
    log = episodes([4, 3]) | {"actions": np.array([2, 3, 4, 2, 6, 2, 2], np.uint8)}
    transitions = from_steps(**log, source="mine", discrete=range(2, 7)).transitions
    np.testing.assert_array_equal(transitions.action, [0, 1, 2, 4, 0])
    for choices in (range(3, 9), range(2, 6), range(-300, 6)):
        with pytest.raises(DataError, match="lie between 2 and 6, but the environment's between"):
            from_steps(**log, source="mine", discrete=choices)
    with pytest.raises(DataError, match=f"of {2**62} choices"):
        from_steps(**log, source="mine", discrete=range(2**62))
    log["actions"] = log["actions"].astype(np.int64) + MAX_ACTIONS - 7
    assert from_steps(**log, source="mine", discrete=True).transitions.action.max() == MAX_ACTIONS - 1


def test_a_box_of_another_width_is_refused():
    with pytest.raises(DataError, match="actions have 2 numbers per step, but their box has 3"):
        from_steps(**episodes([4]), source="mine", low=[-1] * 3, high=[1] * 3)


@pytest.mark.parametrize(
    ("random", "expert"), [("low", 1.0), (np.nan, 1.0), (2.0, 1.0), (1.0, 1.0), ([0], [1])]
)
def test_a_reference_must_be_two_numbers_in_order(random, expert):
    with pytest.raises(DataError, match="mine: its reference returns are"):
        reference(random, expert, "mine")


@pytest.mark.parametrize(("low", "high"), [(-np.inf, np.inf), (1, -1), ([0, 0], [1, 0])])
def test_an_impossible_box_is_refused(low, high):
    with pytest.raises(DataError, match="finite bounds"):
        from_steps(**episodes([4]), source="mine", low=low, high=high)


@pytest.mark.parametrize("bound", [np.finfo(np.float32).max, 2e38, 1e20])
def test_a_box_in_which_all_actions_would_be_one_number_is_refused(bound):
    """As Minari has where somebody wrote "unbounded" so; NaN came of the widest."""
    with pytest.raises(DataError, match="is so wide that actions in it"):
        from_steps(**episodes([4]), source="mine", low=-bound, high=bound)


def test_digest_is_a_function_of_names_types_shapes_and_bytes():
    def tiny(reward):
        column = np.arange(2, dtype=np.float32)
        transitions = Transition(
            column[:, None], column.astype(np.int32), reward, column, column, column, column
        )
        return Dataset(transitions, np.array([False, True]))

    one = digest(tiny(np.array([1, 2], np.float32)))
    # Recorded: a change of this value orphans every digest in users' results.
    assert one == "5c8d74ba5572f57892136e4d14fcebeb186911effdcdaecdbdf2230d09962768"
    assert digest(tiny(np.array([1, 2], np.float32))) == one
    assert digest(tiny(np.array([1, 3], np.float32))) != one
    assert digest(tiny(np.array([[1, 2]], np.float32))) != one
    assert digest(tiny(np.array([1, 2], np.float32).view(np.int32))) != one
    assert digest(tiny(np.array([1, 9, 2, 9], np.float32)[::2])) == one  # not of the memory layout


def test_spec_is_inferred():
    log = episodes([4])
    assert loaded(from_steps(**log, source=""), environment=None, source="").spec == ((2,), 2, False)
    log["actions"] = np.array([0, 5, 1, 1])
    dataset = from_steps(**log, source="", discrete=True)
    assert loaded(dataset, environment=None, source="").spec == ((2,), 6, True)
    assert loaded(dataset, environment=None, source="", choices=9).spec.action_size == 9


@pytest.mark.parametrize("choices", [0, 5])
def test_choices_must_hold_every_logged_action(choices):
    log = episodes([4]) | {"actions": np.array([0, 5, 1, 1])}
    dataset = from_steps(**log, source="", discrete=True)
    with pytest.raises(DataError, match=f"mine: choices={choices}, but .* action 5: give at least 6"):
        loaded(dataset, environment="Mine-v0", source="mine", choices=choices)


def test_a_number_of_actions_that_is_guessed_is_noted():
    log = episodes([4]) | {"actions": np.array([0, 5, 1, 1])}
    dataset = from_steps(**log, source="", discrete=True)
    alone = loaded(dataset, environment=None, source="", note="mine")
    assert alone.note.startswith(
        "mine; 6 actions, as the largest in the log is 5: if there are more, name the env"
    )
    assert not loaded(dataset, environment=None, source="", choices=9).note
    assert not loaded(dataset, environment="Mine-v0", source="").note


def test_a_log_without_time_limits_is_warned_of(recwarn):
    log = episodes([4, 3])
    with_next = log | {"next_observations": log["observations"] + [0, 1]}
    log["terminals"] = log.pop("timeouts")
    with pytest.warns(
        UserWarning, match=r"^mine: no time limits are marked \('timeouts'\).* are paired: mark .* zeros"
    ):
        from_steps(**log, source="mine")
    recwarn.clear()
    from_steps(**log, timeouts=np.zeros(7), source="mine")
    from_steps(**with_next | {"terminals": log["terminals"], "timeouts": None}, source="mine")
    assert not recwarn.list


def test_next_observations_across_resets_are_refused():
    """A log's observations, shifted by one step, where episodes begin anywhere."""
    rng = np.random.default_rng(0)
    log = episodes([20] * 5)
    starts = np.repeat(rng.normal(size=(5, 2)) * 10, 20, 0)
    log["observations"] = (starts + 0.1 * np.tile(np.arange(20), 5)[:, None]).astype(np.float32)
    true = log["observations"] + np.float32(0.1)
    shifted = np.roll(log["observations"], -1, 0)
    assert from_steps(**log, next_observations=true, source="mine").last.sum() == 5
    with pytest.raises(DataError, match=r"^mine: next observations at time limits .* all 4 of them.*: leave"):
        from_steps(**log, next_observations=shifted, source="mine")
    from_steps(**log, next_observations=shifted, source="mine", continuing=True)
    rows = np.arange(100)[:, None]
    with pytest.raises(DataError, match=r"^mine: next observations at time limits .* 3 of 4 of them"):
        from_steps(**log, next_observations=np.where(rows == 39, true, shifted), source="mine")
    from_steps(**log, next_observations=np.where(rows % 40 == 39, true, shifted), source="mine")


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
def test_rows_in_which_a_vector_environment_only_resets_are_warned_of(mode, recwarn):
    """Gymnasium's default leads from the end of each episode into the next, with a reward of 0."""
    mode = gymnasium.vector.AutoresetMode[mode]
    env = gymnasium.make_vec("Pendulum-v1", 1, max_episode_steps=10, vector_kwargs={"autoreset_mode": mode})
    observation, _ = env.reset(seed=0)
    rows = []
    for _ in range(44):
        following, reward, terminated, truncated, _ = env.step(np.ones((1, 1), np.float32))
        rows.append((observation[0], np.ones(1), reward[0], terminated[0], truncated[0]))
        observation = following
    names = ("observations", "actions", "rewards", "terminals", "timeouts")
    log = {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    from_steps(**log, source="mine")
    assert [str(one.message)[:46] for one in recwarn.list if "NEXT_STEP" in str(one.message)] == (
        ["mine: the first reward after each of 4 ends of"] if mode.name == "NEXT_STEP" else []
    )


def test_an_environment_that_may_have_gone_on_after_time_limits_is_warned_of(recwarn):
    """From any state by an ordinary step; or to the one state in which all episodes begin."""
    with pytest.warns(UserWarning, match="mine: at all 4 time limits the next observation is"):
        from_steps(**chained(50), source="mine")
    log = chained(50)
    log["observations"] = log["observations"] % 10
    log["next_observations"] = np.roll(log["observations"], -1, 0)
    with pytest.warns(UserWarning, match="mine: at all 4 time limits the next observation is"):
        from_steps(**log, source="mine")
    recwarn.clear()
    from_steps(**chained(30), source="mine")  # with two of them it may be an accident
    assert not recwarn.list


def test_time_limits_that_are_all_terminals_are_warned_of(recwarn):
    log = episodes([4, 3, 2])
    both = log | {"terminals": log["timeouts"]}
    with pytest.warns(UserWarning, match="^mine: all 3 time limits are marked as terminals, too: .* are 0"):
        dataset = from_steps(**both, source="mine")
    assert dataset.transitions.discount[dataset.last].sum() == 0
    recwarn.clear()
    from_steps(**log | {"terminals": log["timeouts"] & (np.arange(9) > 3)}, source="mine")
    assert not recwarn.list


@pytest.mark.parametrize(
    ("actions", "warned"),
    [([0, 1, 1, 0], True), ([-1, 1, 1, -1], False), ([0, 0.5, 1, 0], False), ([1, 1, 1, 1], False)],
)
def test_floats_that_look_like_choices_are_warned_of(actions, warned, recwarn):
    log = episodes([4]) | {"actions": np.array(actions, np.float32)}
    from_steps(**log, source="mine")
    assert [str(x.message) for x in recwarn.list] == warned * [
        "mine: all actions are whole numbers: if they are choices, save them as integers"
    ]
