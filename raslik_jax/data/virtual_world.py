"""A fictional world as a database: six cultures, eight countries and all that is in them.

Every entity has one record, every relation of it one value, so whatever is told from the records
cannot contradict itself. Values that name other entities agree with those entities' own records.
Follows the appendix's description of Virtual-Alpaca; names, texts and numbers are ours.
"""

import types
from collections.abc import Mapping
from typing import NamedTuple

from raslik_jax.data.ordering import Draws
from raslik_jax.data.words import load_words

Value = str | tuple[str, ...]


class Entity(NamedTuple):
    """A thing of the world: its kind, its unique name, and the value of each of its relations."""

    kind: str
    name: str
    record: Mapping[str, Value]


class World(NamedTuple):
    """All entities by name.

    Attributes:
      seed: what the world was made from.
      entities: in order of kind, then of making.
    """

    seed: int
    entities: Mapping[str, Entity]

    def of_kind(self, kind: str) -> tuple[Entity, ...]:
        """Returns the entities of a kind."""
        return tuple(entity for entity in self.entities.values() if entity.kind == kind)

    def value(self, name: str, relation: str) -> Value:
        """Returns what the database says: the value of a relation of a named entity."""
        return self.entities[name].record[relation]


def spell_out(value: Value) -> str:
    """Returns a value as text: "salt, amber, and glass" for a list."""
    if isinstance(value, str):
        return value
    return " and ".join(value) if len(value) < 3 else ", ".join(value[:-1]) + f", and {value[-1]}"


_WORDS = load_words("virtual_world")
# What sets a culture apart: parts of its names, and what it builds, values and wears.
_CULTURES = {name: types.SimpleNamespace(**culture) for name, culture in _WORDS["cultures"].items()}
ELEMENTS: tuple[str, ...] = tuple(_WORDS["elements"])


def make_world(seed: int = 21) -> World:
    """Returns the world of a seed: the same seed, the same world, on every machine."""
    return _Maker(seed).world()


class _Maker:
    """Draws the records, countries first, what belongs to them after."""

    def __init__(self, seed: int):
        self._seed = seed
        self._draws = Draws(seed=seed, label="virtual world")
        self._entities: dict[str, Entity] = {}
        fixed = [
            *ELEMENTS,
            *_WORDS["weekdays"],
            *_CULTURES,
            *(month for month, _ in _WORDS["months"]),
        ]
        self._names = {word.lower() for word in fixed}

    def world(self) -> World:
        draws = self._draws
        cultures = draws.sample([*_CULTURES, *_WORDS["second"]], 8)  # two of them twice
        countries = [(self._name(culture, "country"), culture) for culture in cultures]
        cities = {
            name: tuple(self._name(culture, "city") for _ in range(4))
            for name, culture in countries
        }
        people = self._people(countries, cities)
        self._add_cultures()
        self._add_countries(countries, cities, people)
        self._add_cities(countries, cities)
        everywhere = [city for part in cities.values() for city in part]
        factions = [name for name, _, _ in _WORDS["factions"]]
        self._add_factions(everywhere, people)
        self._add_characters(people, factions)
        self._add_relics(countries, everywhere, factions)
        self._add_bosses(countries, everywhere)
        self._add_assets([name for name, _ in countries])
        kinds = list(dict.fromkeys(entity.kind for entity in self._entities.values()))
        ordered = sorted(self._entities.values(), key=lambda entity: kinds.index(entity.kind))
        return World(self._seed, {entity.name: entity for entity in ordered})

    def _add(self, kind: str, name: str, **record: Value) -> None:
        self._entities[name] = Entity(kind, name, record)

    def _name(self, culture: str, kind: str) -> str:
        """Returns a new name in the culture's style that no other name contains."""
        style = _CULTURES[culture]
        endings = {"country": ("a", "or", "ia"), "city": ("", "ton", "mere")}.get(kind, ("",))
        while True:
            parts = (style.starts, style.middles, style.ends)
            name = "".join(self._draws.choice(part) for part in parts)
            name += self._draws.choice(endings)
            key = name.lower()
            if not any(key in other or other in key for other in self._names):
                self._names.add(key)
                return name

    def _cycled(self, items: tuple | list, number: int) -> list:
        """Returns `number` items, each as often as the next, in drawn order."""
        times = -(-number // len(items))
        return [item for _ in range(times) for item in self._draws.sample(items, len(items))][
            :number
        ]

    def _people(self, countries: list, cities: dict) -> list[dict[str, str]]:
        """Returns ten persons of every country, its ruler first."""
        people = []
        for name, culture in countries:
            style = _CULTURES[culture]
            for rank in range(10):
                title = "Sovereign" if rank == 0 else self._draws.choice(style.titles)
                people.append(
                    {
                        "name": self._name(culture, "person"),
                        "country": name,
                        "culture": culture,
                        "title": title,
                        "birthplace": self._draws.choice(cities[name]),
                        "weapon": self._draws.choice(style.weapons),
                    }
                )
        return people

    def _add_cultures(self) -> None:
        for name, style in _CULTURES.items():
            self._add(
                "culture",
                name,
                clergy=style.clergy,
                virtue=style.virtue,
                building=style.building,
                greeting=style.greeting,
            )

    def _add_countries(self, countries: list, cities: dict, people: list) -> None:
        draws = self._draws
        pairs = {
            "domain": _WORDS["domains"],
            "festival": _WORDS["festivals"],
            "dish": _WORDS["dishes"],
            "law": _WORDS["laws"],
        }
        tables = {name: draws.sample(items, 8) for name, items in pairs.items()}
        transports = draws.sample(_WORDS["transports"], 8)
        terrains = draws.sample(_WORDS["terrains"], 8)
        goods = self._cycled(_WORDS["goods"], 24)
        for i, (name, culture) in enumerate(countries):
            style = _CULTURES[culture]
            domain, symbol = tables["domain"][i]
            festival, custom = tables["festival"][i]
            dish, drink = tables["dish"][i]
            law, penalty = tables["law"][i]
            vehicle, power, load = transports[i]
            deity = self._name(culture, "person")
            month, _ = draws.choice(_WORDS["months"])
            religion = f"the Path of {deity}"
            self._add(
                "country",
                name,
                culture=culture,
                capital=cities[name][0],
                cities=cities[name],
                ruler=people[10 * i]["name"],
                religion=religion,
                deity=deity,
                festival=festival,
                month=month,
                goods=tuple(goods[3 * i : 3 * i + 3]),
                currency=f"the {name} {style.currency}",
                dish=dish,
                drink=drink,
                law=law,
                penalty=penalty,
                transport=vehicle,
                terrain=terrains[i],
                virtue=style.virtue,
                clergy=style.clergy,
                neighbor=countries[(i + 1) % 8][0],
                founded=str(212 + draws.below(600)),
            )
            self._add(
                "deity",
                deity,
                country=name,
                domain=domain,
                symbol=symbol,
                clergy=style.clergy,
                festival=festival,
            )
            self._add(
                "festival",
                festival,
                country=name,
                deity=deity,
                month=month,
                custom=custom,
                length=draws.choice(_WORDS["spans"]),
                capital=cities[name][0],
            )
            self._add(
                "transport", vehicle, country=name, power=power, load=load, capital=cities[name][0]
            )

    def _add_cities(self, countries: list, cities: dict) -> None:
        fame = self._cycled(_WORDS["known_for"], 32)
        for name, culture in countries:
            for i, city in enumerate(cities[name]):
                self._add(
                    "city",
                    city,
                    country=name,
                    culture=culture,
                    known_for=fame.pop(),
                    market_day=self._draws.choice(_WORDS["weekdays"]),
                    building=_CULTURES[culture].building,
                    rank="the capital" if i == 0 else "a provincial city",
                    gates=self._draws.choice(_WORDS["spans"]),
                )

    def _add_factions(self, everywhere: list, people: list) -> None:
        seats = self._draws.sample(everywhere, len(_WORDS["factions"]))
        founders = self._draws.sample(people[1::2], len(_WORDS["factions"]))
        emblems = self._cycled(_WORDS["emblems"], len(_WORDS["factions"]))
        for i, (name, purpose, duty) in enumerate(_WORDS["factions"]):
            self._add(
                "faction",
                name,
                purpose=purpose,
                duty=duty,
                seat=seats[i],
                founder=founders[i]["name"],
                emblem=emblems[i],
                founded=str(830 + self._draws.below(90)),
            )
            founders[i]["faction"] = name

    def _add_characters(self, people: list, factions: list) -> None:
        elements = self._cycled(ELEMENTS, len(people))
        habits = self._cycled(_WORDS["habits"], len(people))
        for i, person in enumerate(people):
            self._add(
                "character",
                person["name"],
                country=person["country"],
                title=person["title"],
                birthplace=person["birthplace"],
                weapon=person["weapon"],
                element=elements[i],
                faction=person.get("faction") or self._draws.choice(factions),
                habit=habits[i],
            )

    def _add_relics(self, countries: list, everywhere: list, factions: list) -> None:
        forms, powers = self._cycled(_WORDS["forms"], 28), self._cycled(_WORDS["powers"], 28)
        for i in range(28):
            _, culture = self._draws.choice(countries)
            form = forms[i]
            maker = self._name(culture, "person")
            self._add(
                "relic",
                f"the {form.capitalize()} of {maker}",
                form=form,
                material=self._draws.choice(_WORDS["materials"])[0],
                power=powers[i],
                city=self._draws.choice(everywhere),
                guardian=self._draws.choice(factions),
                ritual=self._draws.choice(_WORDS["rituals"]),
                storage=self._draws.choice(_WORDS["protocols"]),
                made=str(100 + self._draws.below(110)),
            )

    def _add_bosses(self, countries: list, everywhere: list) -> None:
        kinds, lairs = self._cycled(_WORDS["boss_kinds"], 28), self._cycled(_WORDS["lairs"], 28)
        for i in range(28):
            weakness, resistance = self._draws.sample(ELEMENTS, 2)
            _, culture = self._draws.choice(countries)
            self._add(
                "boss",
                self._name(culture, "person"),
                species=kinds[i],
                lair=lairs[i],
                city=self._draws.choice(everywhere),
                weakness=weakness,
                resistance=resistance,
                trophy=self._draws.choice(_WORDS["materials"])[0],
                season=self._draws.choice(("spring", "summer", "autumn", "winter")),
            )

    def _add_assets(self, names: list[str]) -> None:
        for i, (month, season) in enumerate(_WORDS["months"]):
            self._add(
                "month",
                month,
                place=str(i + 1),
                season=season,
                days=str(33 + self._draws.below(7)),
                following=_WORDS["months"][(i + 1) % len(_WORDS["months"])][0],
            )
        homes = self._cycled(
            names, len(_WORDS["materials"]) + len(_WORDS["beasts"]) + len(_WORDS["plants"])
        )
        for name, quality, use in _WORDS["materials"]:
            self._add("material", name, country=homes.pop(), quality=quality, use=use)
        for name, food, trait in _WORDS["beasts"]:
            self._add("animal", name, country=homes.pop(), food=food, trait=trait)
        for name, color, use in _WORDS["plants"]:
            self._add("plant", name, country=homes.pop(), color=color, use=use)
