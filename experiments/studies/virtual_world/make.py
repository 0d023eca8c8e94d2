"""Makes experiments/studies/corpora/virtual_world.json: six cultures, eight countries and all in them.

  python experiments/studies/virtual_world/make.py > experiments/studies/corpora/virtual_world.json

Every entity has one record, and every relation of it has one value. So texts from the records
cannot contradict each other. Values that name other entities agree with the records of those
entities. The world follows the appendix's description of Virtual-Alpaca. Names, texts and numbers
are ours.
"""

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from experiments.studies.corpora.draws import Draws

# The world of the package.
SEED = 21
Value = str | tuple[str, ...]


class Entity(NamedTuple):
    """A thing of the world: its kind, its unique name and the value of each relation."""

    kind: str
    name: str
    record: Mapping[str, Value]


_WORDS = json.loads(pathlib.Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
# Rows of several columns, as mappings from relations to values.
_TABLES: dict[str, list[dict[str, str]]] = {
    name: [dict(zip(columns, row, strict=True)) for row in _WORDS[name]]
    for name, columns in _WORDS["columns"].items()
}
# What sets a culture apart: parts of its names, and what it builds, values and wears.
_CULTURES: dict[str, dict[str, Any]] = _WORDS["cultures"]
_ELEMENTS: list[str] = _WORDS["elements"]
_MONTHS = _TABLES["months"]


class _Country(NamedTuple):
    """The sources of a country's records. Its first person is the ruler."""

    name: str
    culture: str
    cities: tuple[str, ...]
    people: list[dict[str, str]]


def make_world(seed: int) -> dict[str, Entity]:
    """Returns the entities of a seed's world by name: the same ones on every machine."""
    maker = _Maker(seed)
    countries = maker.draw_countries()
    cities = [city for country in countries for city in country.cities]
    # The order decides what is drawn.
    for name, culture in _CULTURES.items():
        told = ("clergy", "virtue", "building", "greeting")
        maker.add("culture", name, **{relation: culture[relation] for relation in told})
    maker.add_countries(countries)
    maker.add_cities(countries)
    for add in (maker.add_characters, maker.add_relics, maker.add_bosses):
        add(countries, cities)
    maker.add_assets(countries)
    kinds = list(dict.fromkeys(entity.kind for entity in maker.entities.values()))
    ordered = sorted(maker.entities.values(), key=lambda entity: kinds.index(entity.kind))
    return {entity.name: entity for entity in ordered}


class _Maker:
    """Draws the records: countries first, then their parts."""

    def __init__(self, seed: int):
        self.entities: dict[str, Entity] = {}
        self._draws = Draws(seed=seed, label="virtual world")
        months = (month["name"] for month in _MONTHS)
        taken = (*_ELEMENTS, *_WORDS["weekdays"], *_CULTURES, *months)
        self._names = set(map(str.lower, taken))

    def add(self, kind: str, name: str, **record: Value) -> None:
        self.entities[name] = Entity(kind, name, record)

    def _pick(self, table: str) -> Any:
        return self._draws.choice(_WORDS[table])

    def _name(self, culture: str, endings: Sequence[str] = ("",)) -> str:
        """Returns a new name in the culture's style that no other name contains."""
        style = _CULTURES[culture]
        while True:
            parts = (style["starts"], style["middles"], style["ends"], endings)
            name = "".join(map(self._draws.choice, parts))
            key = name.lower()
            if not any(key in other or other in key for other in self._names):
                self._names.add(key)
                return name

    def _cycled(self, items: Sequence[str], number: int) -> list[str]:
        """Returns `number` items in drawn order, each equally often."""
        drawn: list[str] = []
        while len(drawn) < number:
            drawn += self._draws.sample(items, len(items))
        return drawn[:number]

    def draw_countries(self) -> list[_Country]:
        """Returns eight countries, each with four cities and ten people."""
        cultures = self._draws.sample([*_CULTURES, *_WORDS["second"]], 8)  # two of them twice
        names = [self._name(culture, ("a", "or", "ia")) for culture in cultures]
        endings = ("", "ton", "mere")
        cities = [tuple(self._name(culture, endings) for _ in range(4)) for culture in cultures]
        countries = [_Country(*parts, []) for parts in zip(names, cultures, cities, strict=True)]
        for country in countries:
            style = _CULTURES[country.culture]
            for rank in range(10):
                title = self._draws.choice(style["titles"]) if rank else "Sovereign"
                person = {"title": title, "name": self._name(country.culture)}
                person |= {"country": country.name}
                person |= {"birthplace": self._draws.choice(country.cities)}
                person |= {"weapon": self._draws.choice(style["weapons"])}
                country.people.append(person)
        return countries

    def add_countries(self, countries: Sequence[_Country]) -> None:
        """Adds countries, with the deity, festival and transport of each."""
        names = ("domains", "festivals", "dishes", "laws", "transports")
        tables = {name: self._draws.sample(_TABLES[name], 8) for name in names}
        terrains = self._draws.sample(_WORDS["terrains"], 8)
        goods = self._cycled(_WORDS["goods"], 24)
        for i, country in enumerate(countries):
            domain, feast, dish, law, transport = (tables[name][i] for name in names)
            style = _CULTURES[country.culture]
            deity, festival = self._name(country.culture), feast["festival"]
            month = self._pick("months")[0]
            here = {"country": country.name, "capital": country.cities[0]}
            faith = {"festival": festival, "clergy": style["clergy"]}
            record: dict[str, Value] = {"capital": country.cities[0], "cities": country.cities}
            record |= {"culture": country.culture, "virtue": style["virtue"]} | dish | law | faith
            record |= {"ruler": country.people[0]["name"], "month": month, "deity": deity}
            record |= {"religion": f"the Path of {deity}", "goods": tuple(goods[3 * i : 3 * i + 3])}
            record |= {"currency": f"the {country.name} {style['currency']}"}
            record |= {"transport": transport["name"], "terrain": terrains[i]}
            record |= {"neighbor": countries[(i + 1) % 8].name}
            record |= {"founded": str(212 + self._draws.below(600))}
            self.add("country", country.name, **record)
            self.add("deity", deity, country=country.name, **domain, **faith)
            held = {"deity": deity, "month": month, "custom": feast["custom"], **here}
            self.add("festival", festival, length=self._pick("spans"), **held)
            self.add("transport", **transport, **here)

    def add_cities(self, countries: Sequence[_Country]) -> None:
        fame = self._cycled(_WORDS["known_for"], 32)
        for country in countries:
            record = {"country": country.name, "culture": country.culture}
            record |= {"building": _CULTURES[country.culture]["building"]}
            for city in country.cities:
                rank = "the capital" if city == country.cities[0] else "a provincial city"
                record |= {"rank": rank, "known_for": fame.pop()}
                record |= {"market_day": self._pick("weekdays"), "gates": self._pick("spans")}
                self.add("city", city, **record)

    def add_characters(self, countries: Sequence[_Country], cities: Sequence[str]) -> None:
        """Adds factions and people. One of the people founded each faction."""
        people = [person for country in countries for person in country.people]
        factions = _TABLES["factions"]
        seats = self._draws.sample(cities, len(factions))
        founders = self._draws.sample(people[1::2], len(factions))
        emblems = self._cycled(_WORDS["emblems"], len(factions))
        for faction, seat, founder, emblem in zip(factions, seats, founders, emblems, strict=True):
            founded = str(830 + self._draws.below(90))
            more = {"seat": seat, "founder": founder["name"], "emblem": emblem, "founded": founded}
            self.add("faction", **faction, **more)
            founder["faction"] = faction["name"]
        elements = self._cycled(_ELEMENTS, len(people))
        habits = self._cycled(_WORDS["habits"], len(people))
        for person, element, habit in zip(people, elements, habits, strict=True):
            if "faction" not in person:
                person["faction"] = self._draws.choice(factions)["name"]
            self.add("character", **person, element=element, habit=habit)

    def add_relics(self, countries: Sequence[_Country], cities: Sequence[str]) -> None:
        forms, powers = self._cycled(_WORDS["forms"], 28), self._cycled(_WORDS["powers"], 28)
        for form, power in zip(forms, powers, strict=True):
            maker = self._name(self._draws.choice(countries).culture)
            record = {"form": form, "power": power, "material": self._pick("materials")[0]}
            record |= {"city": self._draws.choice(cities), "guardian": self._pick("factions")[0]}
            record |= {"ritual": self._pick("rituals"), "storage": self._pick("protocols")}
            record |= {"made": str(100 + self._draws.below(110))}
            self.add("relic", f"the {form.capitalize()} of {maker}", **record)

    def add_bosses(self, countries: Sequence[_Country], cities: Sequence[str]) -> None:
        kinds, lairs = self._cycled(_WORDS["boss_kinds"], 28), self._cycled(_WORDS["lairs"], 28)
        for species, lair in zip(kinds, lairs, strict=True):
            weakness, resistance = self._draws.sample(_ELEMENTS, 2)
            name = self._name(self._draws.choice(countries).culture)
            record = {"species": species, "lair": lair, "city": self._draws.choice(cities)}
            record |= {"weakness": weakness, "resistance": resistance}
            record |= {"trophy": self._pick("materials")[0]}
            record |= {"season": self._draws.choice(("spring", "summer", "autumn", "winter"))}
            self.add("boss", name, **record)

    def add_assets(self, countries: Sequence[_Country]) -> None:
        """Adds months, materials, animals and plants."""
        for i, month in enumerate(_MONTHS):
            following = _MONTHS[(i + 1) % len(_MONTHS)]["name"]
            days = str(33 + self._draws.below(7))
            self.add("month", **month, place=str(i + 1), days=days, following=following)
        tables = {"material": "materials", "animal": "beasts", "plant": "plants"}
        assets = [(kind, row) for kind, table in tables.items() for row in _TABLES[table]]
        homes = self._cycled([country.name for country in countries], len(assets))
        for kind, row in assets:
            self.add(kind, **row, country=homes.pop())


def spell_out(value: Value) -> str:
    """Returns a value as text: "salt, amber, and glass" for a list."""
    if isinstance(value, str):
        return value
    return " and ".join(value) if len(value) < 3 else ", ".join(value[:-1]) + f", and {value[-1]}"


def render(world: Mapping[str, Entity]) -> str:
    """Returns a world as JSON: by kind and name the records, each on a line."""
    kinds: dict[str, list[str]] = {}
    for entity in world.values():
        record = {relation: spell_out(value) for relation, value in entity.record.items()}
        line = f"  {json.dumps(entity.name)}: {json.dumps(record)}"
        kinds.setdefault(entity.kind, []).append(line)
    parts = [
        f" {json.dumps(kind)}: {{\n" + ",\n".join(lines) + "\n }" for kind, lines in kinds.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.stdout.write(render(make_world(SEED)))
