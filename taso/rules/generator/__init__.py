"""Generates rules: enumerates small graphs, finds which are equal, and keeps what is proved and says something new.

A *space* (`spaces`) names templates, operators with their settings, over variables of small shapes. `universe` and
`levels` build every graph of a few operators over it, up to renaming and around nothing that has a simpler form, and
tell values apart by fingerprints in exact arithmetic. `pruning` and `finding` give the equations that explain all
coincidences, `egraph` drops those that follow from others, `statement` writes them down as rules with the conditions
under which both sides have types, the verifier proves them, and `generality` widens them as far as the proof goes.
"""

from taso.rules.generator.generation import Generated, generate
from taso.rules.generator.spaces import SPACES
from taso.rules.generator.universe import Space

__all__ = ["SPACES", "Generated", "Space", "generate"]
