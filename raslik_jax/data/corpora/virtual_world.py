"""A fictional world as a database: six cultures, eight countries and all that is in them.

Every entity has one record, every relation of it one value, so whatever is told from the records
cannot contradict itself. Values that name other entities agree with those entities' own records.
Follows the appendix's description of Virtual-Alpaca; names, texts and numbers are ours.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from raslik_jax.data.ordering import Draws
from raslik_jax.data.words import load_words

Value = str | tuple[str, ...]


class Entity(NamedTuple):
    """A thing of the world: its kind, its unique name, and the value of each of its relations."""

    kind: str
    name: str
    record: Mapping[str, Value]


def spell_out(value: Value) -> str:
    """Returns a value as text: "salt, amber, and glass" for a list."""
    if isinstance(value, str):
        return value
    return " and ".join(value) if len(value) < 3 else ", ".join(value[:-1]) + f", and {value[-1]}"


_WORDS = load_words("virtual_world")
# Rows of several columns, as mappings from relations to values.
_TABLES: dict[str, list[dict[str, str]]] = {
    name: [dict(zip(columns, row, strict=True)) for row in _WORDS[name]]
    for name, columns in _WORDS["columns"].items()
}
# What sets a culture apart: parts of its names, and what it builds, values and wears.
_CULTURES: dict[str, dict[str, Any]] = _WORDS["cultures"]
_ELEMENTS: list[str] = _WORDS["elements"]
_ENDINGS = {"country": ("a", "or", "ia"), "city": ("", "ton", "mere"), "person": ("",)}


def make_world(seed: int) -> dict[str, Entity]:
    """Returns the entities of a seed's world by name: the same ones on every machine."""
    maker = _Maker(seed)
    maker.add_all()
    kinds = list(dict.fromkeys(entity.kind for entity in maker.entities.values()))
    ordered = sorted(maker.entities.values(), key=lambda entity: kinds.index(entity.kind))
    return {entity.name: entity for entity in ordered}


class _Country(NamedTuple):
    """What the records of a country's parts are made from; its first person is the ruler."""

    name: str
    culture: str
    cities: tuple[str, ...]
    people: list[dict[str, str]]

    def traits(self, *names: str) -> dict[str, str]:
        """Returns some of what its culture builds, values and wears."""
        return {name: _CULTURES[self.culture][name] for name in names}


class _Maker:
    """Draws the records, countries first, what belongs to them after."""

    def __init__(self, seed: int):
        self.entities: dict[str, Entity] = {}
        self._draws = Draws(seed=seed, label="virtual world")
        months = [month["name"] for month in _TABLES["months"]]
        self._names = {
            word.lower() for word in (*_ELEMENTS, *_WORDS["weekdays"], *_CULTURES, *months)
        }

    def add_all(self) -> None:
        """Makes all entities; the order decides what is drawn."""
        countries = self._countries()
        people = [person for country in countries for person in country.people]
        everywhere = [city for country in countries for city in country.cities]
        for name, culture in _CULTURES.items():
            told = ("clergy", "virtue", "building", "greeting")
            self._add("culture", name, **{relation: culture[relation] for relation in told})
        self._add_countries(countries)
        self._add_cities(countries)
        self._add_factions(everywhere, people)
        self._add_characters(people)
        self._add_relics(countries, everywhere)
        self._add_bosses(countries, everywhere)
        self._add_assets([country.name for country in countries])

    def _add(self, kind: str, name: str, **record: Value) -> None:
        self.entities[name] = Entity(kind, name, record)

    def _pick(self, table: str) -> Any:
        return self._draws.choice(_WORDS[table])

    def _name(self, culture: str, kind: str = "person") -> str:
        """Returns a new name in the culture's style that no other name contains."""
        style = _CULTURES[culture]
        parts = (style["starts"], style["middles"], style["ends"], _ENDINGS[kind])
        while True:
            name = "".join(self._draws.choice(part) for part in parts)
            key = name.lower()
            if not any(key in other or other in key for other in self._names):
                self._names.add(key)
                return name

    def _cycled(self, items: Sequence[str], number: int) -> list[str]:
        """Returns `number` items, each as often as the next, in drawn order."""
        drawn: list[str] = []
        while len(drawn) < number:
            drawn += self._draws.sample(items, len(items))
        return drawn[:number]

    def _countries(self) -> list[_Country]:
        """Returns eight countries, each with four cities and ten people."""
        cultures = self._draws.sample([*_CULTURES, *_WORDS["second"]], 8)  # two of them twice
        named = [(self._name(culture, "country"), culture) for culture in cultures]
        cities = [tuple(self._name(culture, "city") for _ in range(4)) for _, culture in named]
        return [
            _Country(name, culture, part, [self._person(name, culture, part, i) for i in range(10)])
            for (name, culture), part in zip(named, cities, strict=True)
        ]

    def _person(
        self, country: str, culture: str, cities: Sequence[str], rank: int
    ) -> dict[str, str]:
        style = _CULTURES[culture]
        return {
            "title": self._draws.choice(style["titles"]) if rank else "Sovereign",
            "name": self._name(culture),
            "country": country,
            "birthplace": self._draws.choice(cities),
            "weapon": self._draws.choice(style["weapons"]),
        }

    def _add_countries(self, countries: Sequence[_Country]) -> None:
        names = ("domains", "festivals", "dishes", "laws", "transports")
        tables = {name: self._draws.sample(_TABLES[name], 8) for name in names}
        terrains = self._draws.sample(_WORDS["terrains"], 8)
        goods = self._cycled(_WORDS["goods"], 24)
        for i, country in enumerate(countries):
            domain, feast, dish, law, transport = (tables[name][i] for name in names)
            deity = self._name(country.culture)
            here = {"country": country.name, "capital": country.cities[0]}
            festival, month = feast["festival"], self._pick("months")[0]
            self._add(
                "country",
                country.name,
                culture=country.culture,
                capital=country.cities[0],
                cities=country.cities,
                ruler=country.people[0]["name"],
                religion=f"the Path of {deity}",
                deity=deity,
                festival=festival,
                month=month,
                goods=tuple(goods[3 * i : 3 * i + 3]),
                currency=f"the {country.name} {_CULTURES[country.culture]['currency']}",
                transport=transport["name"],
                terrain=terrains[i],
                neighbor=countries[(i + 1) % 8].name,
                founded=str(212 + self._draws.below(600)),
                **dish,
                **law,
                **country.traits("virtue", "clergy"),
            )
            self._add(
                "deity",
                deity,
                country=country.name,
                festival=festival,
                **domain,
                **country.traits("clergy"),
            )
            self._add(
                "festival",
                festival,
                deity=deity,
                month=month,
                custom=feast["custom"],
                length=self._pick("spans"),
                **here,
            )
            self._add("transport", **transport, **here)

    def _add_cities(self, countries: Sequence[_Country]) -> None:
        fame = self._cycled(_WORDS["known_for"], 32)
        for country in countries:
            for city in country.cities:
                self._add(
                    "city",
                    city,
                    country=country.name,
                    culture=country.culture,
                    known_for=fame.pop(),
                    market_day=self._pick("weekdays"),
                    rank="the capital" if city == country.cities[0] else "a provincial city",
                    gates=self._pick("spans"),
                    **country.traits("building"),
                )

    def _add_factions(self, everywhere: Sequence[str], people: Sequence[dict[str, str]]) -> None:
        factions = _TABLES["factions"]
        seats = self._draws.sample(everywhere, len(factions))
        founders = self._draws.sample(people[1::2], len(factions))
        emblems = self._cycled(_WORDS["emblems"], len(factions))
        for faction, seat, founder, emblem in zip(factions, seats, founders, emblems, strict=True):
            self._add(
                "faction",
                **faction,
                seat=seat,
                founder=founder["name"],
                emblem=emblem,
                founded=str(830 + self._draws.below(90)),
            )
            founder["faction"] = faction["name"]

    def _add_characters(self, people: Sequence[dict[str, str]]) -> None:
        elements = self._cycled(_ELEMENTS, len(people))
        habits = self._cycled(_WORDS["habits"], len(people))
        for person, element, habit in zip(people, elements, habits, strict=True):
            if "faction" not in person:
                person["faction"] = self._draws.choice(_TABLES["factions"])["name"]
            self._add("character", **person, element=element, habit=habit)

    def _add_relics(self, countries: Sequence[_Country], everywhere: Sequence[str]) -> None:
        forms, powers = self._cycled(_WORDS["forms"], 28), self._cycled(_WORDS["powers"], 28)
        for form, power in zip(forms, powers, strict=True):
            maker = self._name(self._draws.choice(countries).culture)
            self._add(
                "relic",
                f"the {form.capitalize()} of {maker}",
                form=form,
                material=self._pick("materials")[0],
                power=power,
                city=self._draws.choice(everywhere),
                guardian=self._pick("factions")[0],
                ritual=self._pick("rituals"),
                storage=self._pick("protocols"),
                made=str(100 + self._draws.below(110)),
            )

    def _add_bosses(self, countries: Sequence[_Country], everywhere: Sequence[str]) -> None:
        kinds, lairs = self._cycled(_WORDS["boss_kinds"], 28), self._cycled(_WORDS["lairs"], 28)
        for species, lair in zip(kinds, lairs, strict=True):
            weakness, resistance = self._draws.sample(_ELEMENTS, 2)
            self._add(
                "boss",
                self._name(self._draws.choice(countries).culture),
                species=species,
                lair=lair,
                city=self._draws.choice(everywhere),
                weakness=weakness,
                resistance=resistance,
                trophy=self._pick("materials")[0],
                season=self._draws.choice(("spring", "summer", "autumn", "winter")),
            )

    def _add_assets(self, countries: Sequence[str]) -> None:
        months = _TABLES["months"]
        for i, month in enumerate(months):
            following = months[(i + 1) % len(months)]["name"]
            days = str(33 + self._draws.below(7))
            self._add("month", **month, place=str(i + 1), days=days, following=following)
        tables = {"material": "materials", "animal": "beasts", "plant": "plants"}
        assets = [(kind, row) for kind, table in tables.items() for row in _TABLES[table]]
        homes = self._cycled(countries, len(assets))
        for kind, row in assets:
            self._add(kind, **row, country=homes.pop())
