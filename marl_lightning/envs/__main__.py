"""Lists the environments: ``python -m marl_lightning.envs [pattern ...]``, such as ``'rware/*4ag*'``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch

from marl_lightning.envs.registry import Family, make_env, registered_families
from marl_lightning.envs.spec import EnvSpec, GroupSpec


def describe_group(name: str, group: GroupSpec) -> str:
    """Returns one line about a group, such as ``"agent: 3 agents, observation (18,) float32, 5 actions"``."""
    agents = "1 agent" if group.num_agents == 1 else f"{group.num_agents} agents"
    if not group.is_discrete:
        actions = f"continuous actions ({group.action_size},)"
    elif len(group.action_parts) == 1:
        actions = f"{group.action_size} actions"
    else:
        actions = f"actions of {' x '.join(map(str, group.action_parts))}"
    space = group.observation_space
    return f"{name}: {agents}, observation {space.shape} {space.dtype}, {actions}"


def describe(spec: EnvSpec) -> str:
    """Returns one line about the groups and the state of an environment."""
    groups = "; ".join(describe_group(name, group) for name, group in spec.groups.items())
    limit = "" if spec.episode_limit is None else f"; at most {spec.episode_limit} steps"
    return f"{groups}; state ({spec.state_size},){limit}"


def describe_family(family: Family) -> str:
    """Returns one line about who plays the games of a family and what has to be installed."""
    native = 'native; that of the package with backend="package"' if family.make and family.make_vector else "native"
    who = native if family.make_vector and not (family.extra and family.make is None) else "of a package"
    return who + (f', pip install "marl-lightning[{family.extra}]"' if family.extra else "")


def lines(patterns: Sequence[str], *, details: bool = True) -> Iterator[str]:
    """Yields the lines of the list.

    Args:
        patterns: of names as a shell knows them; any of them has to match. All names without.
        details: make every environment to tell its groups, which takes a while.
    """
    for family in registered_families().values():
        try:
            names = family.names()
        except ImportError as error:
            if not patterns or any(pattern.partition("/")[0] == family.name for pattern in patterns):
                yield f"{family.name}: not installed; {error}"
            continue
        chosen = [name for name in names if not patterns or any(fnmatch(name, pattern) for pattern in patterns)]
        if chosen:
            yield f"{family.name}: {len(chosen)} environments, {describe_family(family)}"
        for name in chosen:
            if not details:
                yield f"  {name}"
                continue
            try:
                env = make_env(name)
            except Exception as error:  # of any kind, from a package
                yield f"  {name}  cannot be made: {' '.join(str(error).split())}"
                continue
            native = "[native] " if env.spec.metadata.get("backend") == "embedded" else ""
            yield f"  {name}  {native}{describe(env.spec)}"
            env.close()


def main() -> None:
    """Prints the list."""
    parser = argparse.ArgumentParser(prog="python -m marl_lightning.envs", description="Lists the environments.")
    parser.add_argument("patterns", nargs="*", help="of names, such as 'lbf/*8x8*'; all without")
    parser.add_argument("--names", action="store_true", help="only names, without making the environments")
    arguments = parser.parse_args()
    found = False
    for line in lines(arguments.patterns, details=not arguments.names):
        found = True
        print(line, flush=True)
    if not found:
        sys.exit(f"no environment matches {' '.join(arguments.patterns)}; the list without a pattern has all")


if __name__ == "__main__":
    main()
