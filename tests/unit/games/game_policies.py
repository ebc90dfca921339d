"""Small policies for tests of equilibrium computations."""

import torch


def mixed(mask: torch.Tensor) -> torch.Tensor:
    """Returns equal probabilities of legal actions."""
    return mask.float() / mask.sum(-1, keepdim=True)


class Uniform:
    """Takes every legal action with the same probability; the first one if greedy."""

    def initial_state(self, num_envs):
        return {}

    def action_probabilities(self, observations, state, is_first, *, deterministic=False):
        stated = {name: mixed(mask) for name, mask in observations.action_mask.items()}
        if deterministic:
            stated = {
                name: torch.nn.functional.one_hot(p.argmax(-1), p.shape[-1]).float() for name, p in stated.items()
            }
        return stated, state


class Fixed(Uniform):
    """Agent ``i`` of the only group plays ``strategies[i]`` everywhere, whatever it sees."""

    def __init__(self, strategies):
        self.strategies = torch.tensor(strategies, dtype=torch.float32)

    def action_probabilities(self, observations, state, is_first, *, deterministic=False):
        stated = {name: self.strategies.expand(mask.shape) for name, mask in observations.action_mask.items()}
        return stated, state


class KuhnPoker(Uniform):
    """Plays Kuhn poker, and bets with the probability ``bets[card + history]``, such as ``bets["0pb"]``."""

    def __init__(self, bets):
        self.bets = bets

    def action_probabilities(self, observations, state, is_first, *, deterministic=False):
        seen, mask = observations.observation["player"], observations.action_mask["player"]
        stated = torch.zeros(mask.shape)
        for row in range(seen.shape[0]):
            for player in range(2):
                if mask[row, player, -1]:  # waits
                    stated[row, player, -1] = 1
                    continue
                bet = self.bets[read_kuhn(seen[row, player])]
                stated[row, player, :2] = torch.tensor([1 - bet, bet])
        return {"player": stated}, state


def read_kuhn(observation: torch.Tensor) -> str:
    """Returns what a player knows in Kuhn poker, read from its observation: two entries for the player, three for the
    card and two for each of three possible actions."""
    card, history = observation[2:5].argmax().item(), observation[5:].view(3, 2)
    return str(card) + "".join("pb"[action.argmax()] for action in history if action.any())


def kuhn_equilibrium(alpha: float) -> KuhnPoker:
    """Returns the equilibria of Kuhn (1950): player 1 bets a jack with ``alpha`` in [0, 1/3]."""
    first = {"0": alpha, "1": 0, "2": 3 * alpha, "0pb": 0, "1pb": alpha + 1 / 3, "2pb": 1}
    second = {"0p": 1 / 3, "1p": 0, "2p": 1, "0b": 0, "1b": 1 / 3, "2b": 1}
    return KuhnPoker(first | second)
