"""Updates of the Q-learning family, worked out by hand on networks that are tables, and against TorchRL."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from scripted import CounterGame
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.modules import QValueActor, QValueModule
from torchrl.modules.models.multiagent import QMixer
from torchrl.objectives import DQNLoss, ValueEstimators
from torchrl.objectives.multiagent import QMixerLoss

from marl_lightning.algorithms import IQL, QMIX, VDN
from marl_lightning.algorithms.base import check_finite
from marl_lightning.algorithms.q_learning import RewardScale, clip_each_agent, move_towards
from marl_lightning.data.collector import RolloutCollector
from marl_lightning.data.replay import ReplayBatch, ReplayBuffer, replay_records
from marl_lightning.data.samplers import SequenceWindows
from marl_lightning.envs import EnvSpec, GroupSpec, Observations, make_vector_env

STATES, ACTIONS = 3, 2


def spec(agents=1, *, groups=("agents",), shared_reward=False, state_size=2, states=STATES, actions=ACTIONS):
    box = spaces.Box(0, 1, (states,), np.float32)
    return EnvSpec(
        name="scripted/table",
        groups={
            name: GroupSpec(
                agents=tuple(f"{name}_{i}" for i in range(agents)),
                observation_space=box,
                action_space=spaces.Discrete(actions),
            )
            for name in groups
        },
        state_size=state_size,
        shared_reward=shared_reward,
    )


def tabular(algorithm=IQL, *, table, target=None, agents=1, game=None, **options):
    """A module whose value of action ``a`` in state ``s`` is ``table[s][a]``, or ``table[i][s][a]`` of agent ``i``."""
    options = {"gamma": 0.5, "team_reward": None if algorithm is IQL else "sum"} | options
    game = game or spec(agents)
    torch.manual_seed(0)
    module = algorithm(spec=game, hidden_sizes=(STATES + agents * (agents > 1),), share_parameters=True, **options)
    set_table(module.networks, table, agents)
    set_table(module.target_networks, table if target is None else target, agents)
    module.target_networks.requires_grad_(False)
    return module


@torch.no_grad()
def set_table(networks, table, agents):
    table = torch.tensor(table, dtype=torch.float32)
    per_agent = table if table.dim() == 3 else table.expand(agents, *table.shape)
    for network in networks.values():
        layer, head = network.body.mlp.layers[0], network.head
        size = STATES * agents
        # One hidden unit for each agent and state: relu(state + agent - 1) of one-hot vectors.
        inputs = layer.weight.shape[-1]
        layer.weight = torch.nn.Parameter(torch.zeros(size, inputs))
        layer.bias = torch.nn.Parameter(torch.zeros(size))
        head.weight = torch.nn.Parameter(per_agent.reshape(size, ACTIONS).T.clone())
        head.bias = torch.nn.Parameter(torch.zeros(ACTIONS))
        for agent in range(agents):
            for state in range(STATES):
                unit = agent * STATES + state
                layer.weight[unit, state] = 1.0
                if agents > 1:
                    layer.weight[unit, STATES + agent] = 1.0
                    layer.bias[unit] = -1.0


def batch(
    *, state, action, reward, successor, agents=1, groups=("agents",), terminated=(), truncated=(), is_first=(), **parts
):
    """One sequence. ``state``, ``action``, ``reward``, ``successor`` have an entry a step, or a list of one an agent.

    ``terminated``, ``truncated``, ``is_first`` list steps. ``parts`` may give ``burn_in``, ``padding`` (steps),
    ``dead`` and ``next_dead`` (pairs of step and agent), ``illegal`` and ``next_illegal`` (triples with an action).
    """
    length = len(state)

    def per_agent(values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype).reshape(length, -1).expand(length, agents)[:, None]

    def flags(steps, shape=(1,), start=False):
        result = torch.full((length, *shape), start)
        for step in steps:
            result[step if isinstance(step, int) else (step[0], 0, *step[1:])] = not start
        return result

    def observation(values):
        return torch.nn.functional.one_hot(per_agent(values), STATES).float()

    burn_in, padding = parts.get("burn_in", 0), flags(parts.get("padding", ()))
    own = {
        "observation": observation(state),
        "action": per_agent(action),
        "alive": flags(parts.get("dead", ()), (1, agents), True),
        "action_mask": flags(parts.get("illegal", ()), (1, agents, ACTIONS), True),
    }
    after = {
        "observation": observation(successor),
        "reward": per_agent(reward, torch.float32),
        "alive": flags(parts.get("next_dead", ()), (1, agents), True),
        "action_mask": flags(parts.get("next_illegal", ()), (1, agents, ACTIONS), True),
    }
    steps = TensorDict(
        {
            **dict.fromkeys(groups, own),
            "state": torch.ones(length, 1, 2),
            "is_first": flags(is_first),
            "next": {
                **dict.fromkeys(groups, after),
                "state": torch.ones(length, 1, 2),
                "terminated": flags(terminated),
                "truncated": flags(truncated),
            },
        },
        batch_size=[length, 1],
    ).clone()
    mask = ~padding
    mask[:burn_in] = False
    return ReplayBatch(steps=steps, mask=mask, burn_in=burn_in, weight=torch.ones(1), starts=np.zeros(1, np.int64))


def target_of(module, made):
    """The targets ``[L, A or 1]`` that the loss of a batch draws to, found by the loss itself."""
    found = []
    original = module.target

    def spy(*arguments):
        found.append(original(*arguments))
        return found[-1]

    module.target = spy
    module.loss(made)
    module.target = original
    return found[0][:, 0]


TABLE = [[1.0, 4.0], [2.0, 8.0], [16.0, 6.0]]
TARGET = [[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]]
PATH = {"state": [0, 1, 2], "action": [1, 0, 0], "reward": [1.0, 2.0, 3.0], "successor": [1, 2, 0]}


# One step -----------------------------------------------------------------------------------------------------------


def test_the_loss_of_one_sequence_by_hand():
    """Values 4, 2, 16. The best successors by the table are actions 1, 0, 1, worth 40, 50, 20 to the target."""
    module = tabular(table=TABLE, target=TARGET)
    made = batch(**PATH)
    assert target_of(module, made).squeeze(-1).tolist() == [1 + 20, 2 + 25, 3 + 10]
    loss, error, metrics = module.loss(made)
    assert loss.item() == pytest.approx((17**2 + 25**2 + 3**2) / 3)
    assert error.squeeze(-1).tolist() == [17, 25, 3]
    assert metrics["q_value"].item() == pytest.approx(22 / 3)
    loss.backward()
    gradient = module.networks["agents"].head.weight.grad
    # d/dq of the mean of squares, at action and state of each step.
    assert gradient.tolist() == [[0, pytest.approx(-50 / 3), pytest.approx(6 / 3)], [pytest.approx(-34 / 3), 0, 0]]


def test_the_learning_network_chooses_and_the_target_network_values():
    """R33: in state 2 the table prefers action 0 and the target action 1."""
    made = batch(state=[0], action=[0], reward=[0.0], successor=[2])
    assert target_of(tabular(table=TABLE, target=TARGET), made).item() == 25
    assert target_of(tabular(table=TABLE, target=TARGET, double_q=False), made).item() == 30


def test_illegal_actions_are_not_bootstrapped():
    made = batch(state=[0], action=[0], reward=[0.0], successor=[2], next_illegal=[(0, 0, 0)])
    assert target_of(tabular(table=TABLE, target=TARGET), made).item() == 30
    made = batch(state=[0], action=[0], reward=[0.0], successor=[2], next_illegal=[(0, 0, 1)])
    assert target_of(tabular(table=TABLE, target=TARGET, double_q=False), made).item() == 25


def test_only_termination_stops_the_bootstrap():
    """R34."""
    made = batch(**PATH, terminated=[0], truncated=[1])
    module = tabular(table=TABLE, target=TARGET)
    assert target_of(module, made).squeeze(-1).tolist() == [1, 2 + 25, 3 + 10]
    module = tabular(table=TABLE, target=TARGET, time_limit_as_terminal=True)
    assert target_of(module, made).squeeze(-1).tolist() == [1, 2, 3 + 10]


def test_values_that_are_not_finite_behind_an_end_do_no_harm():
    made = batch(**PATH, terminated=[0])
    made.steps["next", "agents", "observation"][0] = float("inf")
    loss, _, _ = tabular(table=TABLE, target=TARGET).loss(made)
    assert loss.isfinite()


@pytest.mark.parametrize("padding", [[2], [0]])
def test_padding_changes_nothing(padding):
    """R35, on either side."""
    module = tabular(table=TABLE, target=TARGET, n_steps=2)
    plain, noisy = batch(**PATH, padding=padding), batch(**PATH, padding=padding)
    for leaf in noisy.steps[padding[0]].values(include_nested=True, leaves_only=True):
        if leaf.dtype == torch.float32:
            leaf.normal_()
    noisy.steps["agents", "action"][padding] = 1
    assert module.loss(plain)[0] == module.loss(noisy)[0]
    noisy.steps["next", "agents", "reward"][1] = 99.0  # and the test can fail
    assert module.loss(plain)[0] != module.loss(noisy)[0]


def test_huber_loss():
    module = tabular(table=TABLE, target=TARGET, huber_delta=5.0)
    assert module.loss(batch(**PATH))[0].item() == pytest.approx((5 * (17 - 2.5) + 5 * (25 - 2.5) + 4.5) / 3)


def test_importance_scales_losses_but_not_their_number():
    module, made = tabular(table=TABLE, target=TARGET), batch(**PATH)
    plain = module.loss(made)[0].item()
    made.weight = torch.tensor([0.25])
    loss, error, _ = module.loss(made)
    assert loss.item() == pytest.approx(plain / 4)
    assert error.squeeze(-1).tolist() == [17, 25, 3]


# Longer targets -----------------------------------------------------------------------------------------------------


def test_n_steps():
    module = tabular(table=TABLE, target=TARGET, n_steps=2)
    assert target_of(module, batch(**PATH)).squeeze(-1).tolist() == [1 + 0.5 * 27, 2 + 0.5 * 13, 13]
    assert target_of(module, batch(**PATH, truncated=[0])).squeeze(-1).tolist() == [21, 2 + 0.5 * 13, 13]
    assert target_of(module, batch(**PATH, terminated=[1])).squeeze(-1).tolist() == [1 + 0.5 * 2, 2, 13]
    assert target_of(module, batch(**PATH, padding=[2])).squeeze(-1).tolist()[:2] == [1 + 0.5 * 27, 27]


def test_td_lambda():
    module = tabular(table=TABLE, target=TARGET, td_lambda=0.5)
    second = 2 + 0.5 * (0.5 * 50 + 0.5 * 13)
    expected = [1 + 0.5 * (0.5 * 40 + 0.5 * second), second, 13]
    assert target_of(module, batch(**PATH)).squeeze(-1).tolist() == pytest.approx(expected)
    found = target_of(module, batch(**PATH, truncated=[1])).squeeze(-1).tolist()
    assert found == pytest.approx([1 + 0.5 * (0.5 * 40 + 0.5 * 27), 27, 13])


def test_an_episode_that_broke_off_is_not_joined_to_the_next():
    """Where an environment could not be resumed, an episode starts without an end before it."""
    for options in ({"n_steps": 3}, {"td_lambda": 0.9}):
        module = tabular(table=TABLE, target=TARGET, **options)
        assert target_of(module, batch(**PATH, is_first=[1]))[0].item() == 21


# Teams --------------------------------------------------------------------------------------------------------------

TWO = {"state": [[0, 1]], "action": [[1, 0]], "reward": [[1.0, 3.0]], "successor": [[1, 2]], "agents": 2}
PAIR = {"table": [TABLE, TABLE], "target": [TARGET, TARGET], "agents": 2}


def test_every_agent_learns_from_its_own_reward():
    module = tabular(**PAIR)
    assert target_of(module, batch(**TWO))[0].tolist() == [1 + 20, 3 + 25]
    assert module.loss(batch(**TWO))[0].item() == pytest.approx((17**2 + 26**2) / 2)


@pytest.mark.parametrize(("how", "reward"), [("sum", 4.0), ("mean", 2.0), ("first", 1.0)])
def test_team_rewards(how, reward):
    module = tabular(**PAIR, team_reward=how)
    assert target_of(module, batch(**TWO))[0].tolist() == [reward + 20, reward + 25]


def test_a_shared_reward_counts_once_a_group():
    steps = batch(**TWO | {"reward": [[3.0, 3.0]], "groups": ("a", "b")}).steps
    game = spec(2, groups=("a", "b"), shared_reward=True)
    assert VDN(spec=game, team_reward="sum").reward(steps).flatten().tolist() == [6]
    assert VDN(spec=game, team_reward="mean").reward(steps).flatten().tolist() == [3]
    assert VDN(spec=spec(2, groups=("a", "b")), team_reward="sum").reward(steps).flatten().tolist() == [12]


def test_dead_agents_do_not_count_and_being_dead_is_worth_nothing():
    """The second agent dies in the step of the first row, and is dead in that of the second."""
    two_steps = {key: value * 2 for key, value in TWO.items() if key != "agents"}
    made = batch(**two_steps, agents=2, next_dead=[(0, 1), (1, 1)], dead=[(1, 1)])
    module = tabular(**PAIR)
    assert target_of(module, made).tolist() == [[21, 3], [21, 3]]
    # Errors 4 - 21, 2 - 3, 4 - 21; the dead one's is left out.
    assert module.loss(made)[0].item() == pytest.approx((17**2 + 1 + 17**2) / 3)
    assert module.loss(made)[1].squeeze(-1).tolist() == [9, 17]


@pytest.mark.parametrize("options", [{"game": spec(2, shared_reward=True)}, {"team_reward": "sum"}])
def test_the_dead_are_paid_with_their_team(options):
    made = batch(**TWO | {"reward": [[4.0, 4.0]]}, next_dead=[(0, 1)], dead=[(0, 1)])
    module = tabular(**PAIR, **options)
    reward = 8 if "team_reward" in options else 4
    assert target_of(module, made)[0].tolist() == [reward + 20, reward + 25]
    assert module.loss(made)[0].item() == pytest.approx(((reward + 16) ** 2 + (reward + 23) ** 2) / 2)


def test_vdn_adds_up():
    module = tabular(VDN, **PAIR)
    made = batch(**TWO)
    assert target_of(module, made).item() == 4 + 0.5 * (40 + 50)
    assert module.loss(made)[0].item() == pytest.approx((4 + 2 - 49) ** 2)
    assert tabular(VDN, **PAIR).weight(made).shape == (1, 1, 1)


def test_vdn_over_several_groups():
    game = spec(2, groups=("a", "b"))
    module = tabular(VDN, **PAIR, game=game)
    assert target_of(module, batch(**TWO, groups=("a", "b"))).item() == 8 + 0.5 * 2 * (40 + 50)


def test_qmix_by_hand():
    """With weights of 1 the hidden unit is the sum of the values, as long as that is positive."""
    module = tabular(QMIX, **PAIR, embedding_size=1, hypernet_size=None)
    for mixer, factor in ((module.mixer, 2.0), (module.target_mixer, 3.0)):
        for parameter in mixer.parameters():
            torch.nn.init.zeros_(parameter)
        torch.nn.init.ones_(mixer.first_weight.bias)
        torch.nn.init.constant_(mixer.second_weight.bias, -factor)  # its absolute value counts
        torch.nn.init.constant_(mixer.first_bias.bias, 1.0)
        torch.nn.init.constant_(mixer.offset[-1].bias, 5.0)
    made = batch(**TWO)
    assert target_of(module, made).item() == 4 + 0.5 * (3 * (40 + 50 + 1) + 5)
    assert module.loss(made)[0].item() == pytest.approx((2 * (4 + 2 + 1) + 5 - 143) ** 2)


def test_a_mixer_needs_a_state_and_a_team_a_reward():
    with pytest.raises(ValueError, match="needs a global state"):
        QMIX(spec=spec(2, state_size=0))
    with pytest.raises(ValueError, match="set team_reward to"):
        VDN(spec=spec(2), team_reward=None)
    with pytest.raises(ValueError, match=r"n_steps=3 or td_lambda=0\.5, not both"):
        IQL(n_steps=3, td_lambda=0.5)
    with pytest.raises(ValueError, match="needs Discrete actions, but those of 'blue'"):
        IQL(spec=CounterGame().spec)
    with pytest.raises(ValueError, match=r"IQL.learning_rate=0.*\n.*gamma=2"):
        IQL(gamma=2, learning_rate=0)


# Independence -------------------------------------------------------------------------------------------------------


def unshared(**options):
    torch.manual_seed(0)
    return IQL(
        spec=spec(2), hidden_sizes=(4,), recurrent=True, share_parameters=False, team_reward=None,
        max_grad_norm=0.1, learning_rate=0.1, **options,
    )  # fmt: skip


def make_step(module, made):
    loss, _, _ = module.loss(made)
    module.optimise(loss, module.configure_optimizers(), module.learned_parameters(), max_grad_norm=0.1)
    return [{name: p[agent].clone() for name, p in module.networks.named_parameters()} for agent in range(2)]


def test_agents_that_share_nothing_learn_as_if_alone():
    """R11: whatever happens to one, the other makes the same step, bit for bit."""
    path = {key: [[row] * 2 for row in value] for key, value in PATH.items()}
    calm = make_step(unshared(), batch(**path, agents=2))
    made = batch(**path, agents=2, dead=[(0, 1)])
    made.steps["next", "agents", "reward"][..., 1] = 1000.0
    made.steps["agents", "observation"][..., 1, :] += 3.0
    wild = make_step(unshared(), made)
    assert all(torch.equal(calm[0][name], wild[0][name]) for name in calm[0])
    assert not any(torch.equal(calm[1][name], wild[1][name]) for name in calm[1])


def test_each_agent_is_clipped_by_its_own_norm():
    module = unshared()
    network = module.networks["agents"]
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    network.head.weight.grad[0, 0, :2] = torch.tensor([3.0, 4.0])
    network.head.bias.grad[1, 0] = 0.5
    assert clip_each_agent(network, 1.0).tolist() == [5.0, 0.5]
    torch.testing.assert_close(network.head.weight.grad[0, 0, :2], torch.tensor([0.6, 0.8]))
    assert network.head.bias.grad[1, 0] == 0.5


def test_unshared_layer_norms_are_refused():
    with pytest.raises(ValueError, match=r"layer_norm=True .* share_parameters=False"):
        IQL(spec=spec(2), share_parameters=False, layer_norm=True)
    IQL(spec=spec(1), share_parameters=False, layer_norm=True)
    VDN(spec=spec(2), share_parameters=False, layer_norm=True)


def test_one_agent_is_the_single_agent_case():
    """Shared or not, with its own reward or the team's, joint or not: the same loss and gradient."""
    losses = []
    for algorithm, options in ((IQL, {"share_parameters": True}), (IQL, {"share_parameters": False}), (VDN, {})):
        torch.manual_seed(0)
        module = algorithm(spec=spec(1), hidden_sizes=(4,), **options)
        loss, _, _ = module.loss(batch(**PATH, truncated=[1]))
        loss.backward()
        losses.append([loss.item(), *module.networks["agents"].head.weight.grad.flatten().tolist()])
    assert losses[0] == pytest.approx(losses[1])
    assert losses[0] == losses[2]


# Memory -------------------------------------------------------------------------------------------------------------


def recurrent_batch(*, burn_in, length, envs=3, rollouts=4):
    """Sequences of the embedded 3m, whose episodes are long, and the module that collected them."""
    torch.manual_seed(0)
    env = make_vector_env("smac/3m", num_envs=envs, seed=0)
    module = IQL(spec=env.spec, hidden_sizes=(8,), recurrent=True, team_reward=None)
    torch.nn.init.normal_(module.networks["agents"].head.weight)
    module.target_networks.load_state_dict(module.networks.state_dict())
    collector = RolloutCollector(env=env, rollout_length=8, keep_final="ended")
    buffer = ReplayBuffer(capacity=400, windows=SequenceWindows(length=length, burn_in=burn_in), seed=0)
    streams, values = buffer.index.open(envs), []
    act = module.networks.action_values

    def spy(*arguments):
        found = act(*arguments)
        values.append(found[0]["agents"].clone())
        return found

    module.networks.action_values = spy
    for _ in range(rollouts):
        buffer.extend(replay_records(collector.collect(module.policy)), streams)
    return module, buffer, torch.stack(values)


def test_burn_in_gives_the_values_of_acting():
    """R32: sequences that start with their episode, or have all of it before them, give the values of the rollout."""
    module, buffer, acted = recurrent_batch(burn_in=31, length=1)
    made = buffer.sample(60)
    value = module.agent_values(module.networks, made).value["agents"][0]
    stream, time = buffer.index.stream[made.starts], buffer.index.seq[made.starts]
    torch.testing.assert_close(value, acted[time, stream], rtol=0, atol=1e-6)


def test_successors_are_valued_from_the_state_after_the_step():
    """In the middle of an episode that is the value of the next step; the successor at an end is another one."""
    module, buffer, acted = recurrent_batch(burn_in=31, length=1)
    made = buffer.sample(200)
    found = module.agent_values(module.networks, made).next_value["agents"][0]
    stream, time = buffer.index.stream[made.starts], buffer.index.seq[made.starts]
    done = (made.steps["next", "terminated"] | made.steps["next", "truncated"])[-1].numpy()
    inside = ~done & (time < 31)
    assert inside.any()
    torch.testing.assert_close(found[inside], acted[time[inside] + 1, stream[inside]], rtol=0, atol=1e-6)


def test_no_gradient_reaches_the_burn_in():
    """R31."""
    module, buffer, _ = recurrent_batch(burn_in=3, length=4)
    made = buffer.sample(16)
    observation = made.steps["agents", "observation"].requires_grad_()
    made.steps["agents", "observation"] = observation
    module.loss(made)[0].backward()
    assert not observation.grad[:3].any()
    assert observation.grad[3:].any()


def test_left_padding_is_inert():
    """R24: noise in the padding before the start of an episode changes nothing, exactly."""
    module, buffer, _ = recurrent_batch(burn_in=12, length=2)
    made = buffer.sample(32)
    padding = torch.from_numpy(buffer.index.window(made.starts, before=12, after=2)) == -1
    assert padding.any()

    def gradient():
        module.zero_grad()
        module.loss(made)[0].backward()
        return torch.cat([p.grad.flatten() for p in module.learned_parameters()])

    before = gradient()
    made.steps["agents", "observation"][padding] = torch.randn_like(made.steps["agents", "observation"][padding])
    assert torch.equal(before, gradient())
    made.steps["agents", "observation"][11] += 1.0
    assert not torch.equal(before, gradient())


def test_an_end_inside_a_sequence_cuts_the_memory():
    """R25: a sequence over an end has the loss of its two pieces."""
    torch.manual_seed(0)
    module = IQL(spec=spec(1), hidden_sizes=(4,), recurrent=True)
    whole = module.loss(batch(**PATH, is_first=[0, 2], truncated=[1]))[0]
    first = {key: value[:2] for key, value in PATH.items()}
    second = {key: value[2:] for key, value in PATH.items()}
    a = module.loss(batch(**first, is_first=[0], truncated=[1]))[0]
    b = module.loss(batch(**second, is_first=[0]))[0]
    assert whole.item() == pytest.approx((2 * a.item() + b.item()) / 3, rel=1e-5)


def test_a_network_without_memory_values_steps_alone():
    """R36: one sequence of three steps has the loss of three transitions."""
    torch.manual_seed(0)
    module = IQL(spec=spec(1), hidden_sizes=(4,))
    whole = module.loss(batch(**PATH, truncated=[1]))[0].item()
    parts = [
        module.loss(batch(**{k: v[t : t + 1] for k, v in PATH.items()}, truncated=[0] * (t == 1)))[0].item()
        for t in range(3)
    ]
    assert whole == pytest.approx(sum(parts) / 3, rel=1e-6)


# Targets and scales -------------------------------------------------------------------------------------------------


def test_hard_target_updates_are_counted_in_updates():
    module = tabular(VDN, **PAIR, target_update_interval=3)
    old, new = module.target_networks["agents"].head.weight, module.networks["agents"].head.weight
    for update in range(1, 7):
        module.updates = update
        with torch.no_grad():
            new.fill_(update)
        module.update_targets()
        assert old[0, 0].item() == {1: 10, 2: 10, 3: 3, 4: 3, 5: 3, 6: 6}[update]


def test_soft_target_updates_move_everything_each_time():
    module = QMIX(spec=spec(2), target_update_rate=0.25)
    pairs = list(zip(module.target_networks.parameters(), module.networks.parameters(), strict=True))
    pairs += list(zip(module.target_mixer.parameters(), module.mixer.parameters(), strict=True))
    for old, new in pairs:
        torch.nn.init.zeros_(old)
        torch.nn.init.ones_(new)
    for update, expected in ((1, 0.25), (2, 0.4375)):
        module.updates = update
        module.update_targets()
        assert all(old.unique().item() == expected for old, _ in pairs)


def test_moving_copies_buffers_too():
    old, new = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    new.running_mean.fill_(3.0)
    move_towards(old, new, rate=0.5)
    assert old.running_mean.tolist() == [3, 3]


def test_targets_are_copies_and_never_learned():
    module = QMIX(spec=spec(2))
    targets = [*module.target_networks.parameters(), *module.target_mixer.parameters()]
    assert not {p.data_ptr() for p in targets} & {p.data_ptr() for p in module.learned_parameters()}
    assert not any(p.requires_grad for p in targets)
    made = batch(**TWO)
    module.loss(made)[0].backward()
    assert all(p.grad is not None for p in module.learned_parameters())


def test_values_start_at_about_zero_whatever_the_state():
    torch.manual_seed(0)
    module = QMIX(spec=spec(2, state_size=24), hidden_sizes=(128, 128))
    value, _, _ = module.networks["agents"](10 * torch.rand(1, 50, 2, STATES + 2), torch.zeros(50, 2, 0), None)
    assert value.abs().max() < 0.5
    assert module.mixer(value.amax(-1), 10 * torch.rand(1, 50, 24)).abs().max() < 5


def test_rewards_are_scaled_but_not_centred():
    scale = RewardScale()
    rewards = torch.tensor([1.0, 5.0, 9.0, 100.0])
    assert scale(rewards).tolist() == rewards.tolist()
    scale.update(rewards[:1], torch.ones(1))
    assert scale(rewards).tolist() == rewards.tolist()  # one number has no deviation
    scale.update(rewards[1:], torch.tensor([1.0, 1.0, 0.0]))
    deviation = np.std([1.0, 5.0, 9.0])
    torch.testing.assert_close(scale(rewards), rewards / deviation)
    many, expected = RewardScale(), torch.randn(1000, dtype=torch.float64) * 3 + 1000
    for chunk in expected.split(7):
        many.update(chunk, torch.ones_like(chunk))
    assert many.moments[1].item() == pytest.approx(expected.mean().item())
    assert (many.moments[2] / 1000).item() == pytest.approx(expected.var(correction=0).item())


def test_the_scale_is_applied_to_targets():
    module = tabular(table=TABLE, target=TARGET, scale_reward=True)
    module.reward_scale.update(torch.tensor([0.0, 4.0]), torch.ones(2))
    assert target_of(module, batch(**PATH)).squeeze(-1).tolist() == pytest.approx([0.5 + 20, 1 + 25, 1.5 + 10])


def test_what_is_not_finite_is_named():
    check_finite({"loss": 1.0}, env_steps=5)
    with pytest.raises(FloatingPointError, match="td_error became NaN or infinite at env step 5"):
        check_finite({"loss": 1.0, "td_error": float("nan")}, env_steps=5)


# Acting -------------------------------------------------------------------------------------------------------------


def test_acting_needs_no_state():
    module = QMIX(spec=spec(2))
    observations = Observations(
        observation={"agents": torch.rand(4, 2, STATES)},
        action_mask={"agents": torch.ones(4, 2, ACTIONS, dtype=torch.bool)},
        alive={"agents": torch.ones(4, 2, dtype=torch.bool)},
        state=None,
    )
    actions, _, state = module.policy.act(observations, {}, torch.ones(4, dtype=torch.bool), deterministic=True)
    assert actions["agents"].shape == (4, 2)
    assert state == {}


def test_checkpoints_hold_the_settings_of_members(tmp_path):
    module = QMIX(embedding_size=5, hypernet_size=None, gamma=0.7)
    assert (module.hparams.embedding_size, module.hparams.hypernet_size, module.hparams.gamma) == (5, None, 0.7)
    torch.save({"state_dict": {}, "hyper_parameters": dict(module.hparams), "pytorch-lightning_version": "2.6.0",
                "marl_lightning": {"env_steps": 3, "updates": 1}}, tmp_path / "x.ckpt")  # fmt: skip
    loaded = QMIX.load_from_checkpoint(tmp_path / "x.ckpt", map_location="cpu")
    assert loaded.hparams == module.hparams
    assert loaded.env_steps == 3


# TorchRL ------------------------------------------------------------------------------------------------------------


def random_batch(agents, *, length=6, sequences=5):
    """Transitions with all kinds of ends."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(length, sequences, *shape, generator=generator)

    ends = torch.rand(length, sequences, generator=generator)
    everything = torch.ones(length, sequences, agents, ACTIONS, dtype=torch.bool)
    steps = {
        "agents": {"observation": noise(agents, STATES), "action": (noise(agents) > 0).long(),
                   "alive": everything[..., 0], "action_mask": everything},
        "state": noise(2), "is_first": torch.zeros(length, sequences, dtype=torch.bool),
        "next": {
            "agents": {"observation": noise(agents, STATES), "reward": noise(agents),
                       "alive": everything[..., 0], "action_mask": everything},
            "state": noise(2), "terminated": ends < 0.3, "truncated": (ends >= 0.3) & (ends < 0.5),
        },
    }  # fmt: skip
    return ReplayBatch(
        steps=TensorDict(steps, batch_size=[length, sequences]),
        mask=torch.ones(length, sequences, dtype=torch.bool),
        burn_in=0,
        weight=torch.ones(sequences),
        starts=np.zeros(sequences, np.int64),
    )


class Values(torch.nn.Module):
    """One of our value networks without memory, as a plain function of observations ``[N, A, F]``."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, observation):
        inputs = self.network.inputs(observation).unsqueeze(0)
        return self.network(inputs, self.network.initial_state(len(observation)), None)[0][0]


def ends(steps):
    return {
        "terminated": steps["next", "terminated"].unsqueeze(-1),
        "done": (steps["next", "terminated"] | steps["next", "truncated"]).unsqueeze(-1),
    }


def load_target(parameters, network):
    """Makes the target parameters of a TorchRL loss those of our target network."""
    TensorDict.from_module(network).data.apply(lambda ours, theirs: theirs.data.copy_(ours), parameters)


@pytest.mark.parametrize("double_q", [True, False])
def test_dqn_of_torchrl_agrees(double_q):
    torch.manual_seed(0)
    module = IQL(spec=spec(1), hidden_sizes=(8,), double_q=double_q, gamma=0.9)
    for network in (module.networks, module.target_networks):
        torch.nn.init.normal_(network["agents"].head.weight)
    made = random_batch(1)
    loss, _, _ = module.loss(made)
    loss.backward()

    class Single(Values):
        def forward(self, observation):
            return super().forward(observation.unsqueeze(1)).squeeze(1)

    oracle = DQNLoss(
        QValueActor(Single(module.networks["agents"]), in_keys=["observation"], action_space="categorical"),
        loss_function="l2",
        delay_value=True,
        double_dqn=double_q,
        action_space="categorical",
    )
    oracle.make_value_estimator(ValueEstimators.TD0, gamma=0.9)
    load_target(
        oracle.target_value_network_params["module", "0", "module", "network"], module.target_networks["agents"]
    )
    steps = made.steps.flatten()
    reward = steps["next", "agents", "reward"]
    data = TensorDict(
        {
            "observation": steps["agents", "observation"].squeeze(1),
            "action": steps["agents", "action"].squeeze(1),
            "next": {"observation": steps["next", "agents", "observation"].squeeze(1), "reward": reward, **ends(steps)},
        },
        batch_size=steps.batch_size,
    )
    assert loss.item() == pytest.approx(oracle(data)["loss"].item(), rel=1e-5)


def test_qmix_of_torchrl_agrees():
    torch.manual_seed(0)
    module = QMIX(spec=spec(2), hidden_sizes=(8,), double_q=False, gamma=0.9, embedding_size=4, hypernet_size=None)
    for part in (
        module.networks["agents"].head,
        module.target_networks["agents"].head,
        module.mixer,
        module.target_mixer,
    ):
        for parameter in part.parameters():
            torch.nn.init.normal_(parameter)

    def their_mixer(ours):
        mixer = QMixer(state_shape=(2,), mixing_embed_dim=4, n_agents=2, device="cpu")
        pairs = (("hyper_w_1", "first_weight"), ("hyper_b_1", "first_bias"), ("hyper_w_final", "second_weight"))
        for theirs, name in (*pairs, ("V", "offset")):
            getattr(mixer, theirs).load_state_dict(getattr(ours, name).state_dict())
        return mixer

    agents = TensorDictSequential(
        TensorDictModule(
            Values(module.networks["agents"]),
            in_keys=[("agents", "observation")],
            out_keys=[("agents", "action_value")],
        ),
        QValueModule(
            action_value_key=("agents", "action_value"),
            out_keys=[("agents", "action"), ("agents", "action_value"), ("agents", "chosen_action_value")],
            action_space="categorical",
        ),
    )
    mixer = TensorDictModule(
        their_mixer(module.mixer),
        in_keys=[("agents", "chosen_action_value"), "state"],
        out_keys=["chosen_action_value"],
    )
    oracle = QMixerLoss(agents, mixer, loss_function="l2", delay_value=True, action_space="categorical")
    oracle.make_value_estimator(ValueEstimators.TD0, gamma=0.9)
    load_target(
        oracle.target_local_value_network_params["module", "0", "module", "network"], module.target_networks["agents"]
    )
    load_target(oracle.target_mixer_network_params["module"], their_mixer(module.target_mixer))
    made = random_batch(2)
    steps = made.steps.flatten()
    data = steps.select(("agents", "observation"), ("agents", "action"), "state").update(
        {"next": {
            "agents": {"observation": steps["next", "agents", "observation"]}, "state": steps["next", "state"],
            "reward": steps["next", "agents", "reward"].sum(-1, keepdim=True), **ends(steps),
        }}
    )  # fmt: skip
    assert module.loss(made)[0].item() == pytest.approx(oracle(data)["loss"].item(), rel=1e-5)
