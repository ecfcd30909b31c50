"""What the demo asks: eight openings for a base model to continue, and a long text that is really text."""

from __future__ import annotations

import itertools

OPENINGS = (
    "The Roman aqueducts were built to bring fresh water into the cities. The longest of them",
    "Photosynthesis is the process by which plants turn light into chemical energy. In the leaves,",
    "The history of the printing press begins in the fifteenth century, when",
    "A lighthouse is a tower that is built on the coast to guide ships at sea. Its lamp",
    "Bees live in colonies of many thousand animals. Every summer the workers",
    "The Pacific Ocean is the largest and deepest of the oceans. It stretches from",
    "Bread is one of the oldest foods that people make. To bake a simple loaf, one needs",
    "The first railways of the nineteenth century changed how people travelled. Before them,",
)

_PLACES = ("harbour", "valley", "old town", "northern coast", "river delta", "market square", "high plain")
_SEASONS = ("spring", "early summer", "autumn", "a mild winter", "the rainy season")
_TRADES = ("fishermen", "weavers", "millers", "carpenters", "glass makers", "farmers", "bakers", "sailors")
_SENTENCES = (
    "In {season} the {trade} of the {place} met to settle the price of grain and to repair the common roads.",
    "A record of year {year} names {number} houses in the {place}, most of them owned by {trade}.",
    "Travellers who came to the {place} in {season} wrote that the {trade} worked from dawn until the bells rang.",
    "By {year} the {place} had a school, two mills and a bridge, which the {trade} had paid for together.",
    "When the flood of {year} reached the {place}, {number} families moved to the hills and stayed until {season}.",
)


def long_text(num_chars: int) -> str:
    """A chronicle in varied sentences, of `num_chars` characters or up to one sentence more."""
    lines: list[str] = ["A chronicle of the province, with all that was written down about its places and trades.\n"]
    size = len(lines[0])
    for number in itertools.count():
        if size >= num_chars:
            break
        sentence = _SENTENCES[number % len(_SENTENCES)].format(
            season=_SEASONS[number % len(_SEASONS)],
            trade=_TRADES[number % len(_TRADES)],
            place=_PLACES[number % len(_PLACES)],
            year=1400 + number,
            number=12 + 7 * number % 480,
        )
        lines.append(sentence)
        size += len(sentence) + 1
    return " ".join(lines)
