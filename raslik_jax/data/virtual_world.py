"""A fictional world as a database: six cultures, eight countries and all that is in them.

Every entity has one record, every relation of it one value, so whatever is told from the records
cannot contradict itself. Values that name other entities agree with those entities' own records.
Follows the appendix's description of Virtual-Alpaca; names, texts and numbers are ours.
"""

from collections.abc import Mapping
from typing import NamedTuple

from raslik_jax.data.ordering import Draws

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


class _Culture(NamedTuple):
    starts: str
    middles: str
    ends: str
    clergy: str
    virtue: str
    building: str
    greeting: str
    currency: str
    titles: str
    weapons: str


# starts, middles and ends of names; then what sets the culture apart.
_CULTURES = {
    "Aeolic": _Culture(
        "Ael Cir Zeph Aer Syl Cael Thal Ther Eur Ion",
        "a e i o ia eo",
        "ra nis thea lian phor dora mis rion lys vane",
        "a choir of wind readers",
        "curiosity and open debate",
        "white towers with sails for roofs",
        "raising an open palm to the wind",
        "feather",
        "Skyreader;Windwarden;Chartmaker;Bell Keeper",
        "a long bow;a weighted sling;a glass javelin;a pair of fans with steel ribs",
    ),
    "Skarn": _Culture(
        "Brak Dorn Grim Thor Kar Hald Urd Skal Varg Stein",
        "a o u e ar or",
        "gar heim dun rik mar grad nok vald stad brek",
        "a ring of forge elders",
        "endurance and plain speech",
        "halls cut into basalt cliffs",
        "striking the chest twice with a fist",
        "ingot",
        "Forgewarden;Shield Captain;Stone Judge;Mine Reeve",
        "a two-handed hammer;a broad axe;an iron-shod staff;a spiked shield",
    ),
    "Lorian": _Culture(
        "Lor Vel Ser Elen Mir Ama Ris Nol Fae Lir",
        "a e i ia an el",
        "via ria dell wyn sara lune nor thel mont vyr",
        "a college of lantern priests",
        "craftsmanship and patient learning",
        "gardens enclosed by carved cedar",
        "bowing with one hand over the heart",
        "petal",
        "Archivist;Master Gardener;Lantern Priest;Court Composer",
        "a ceremonial staff;a slender rapier;a silver-wired whip;a throwing disc",
    ),
    "Vash": _Culture(
        "Vash Qar Zah Tam Jas Rah Shir Kes Naz Dal",
        "a i u ee ah ir",
        "een mira zad har esh lan qir uun bar dim",
        "a circle of moon oracles",
        "hospitality and exact bookkeeping",
        "domed houses around shaded wells",
        "touching the brow and then the ground",
        "dram",
        "Caravan Master;Moon Oracle;Well Keeper;Spice Assessor",
        "a curved saber;a pair of daggers;a blowpipe;a chain with a hooked blade",
    ),
    "Noric": _Culture(
        "Nor Fjal Ska Ing Sven Hol Rag Ost Yrs Bjor",
        "a e i o en al",
        "vik sund fell mark run lund tor gren sey hild",
        "a moot of ice singers",
        "loyalty and shared meals",
        "longhouses roofed with living turf",
        "clasping both forearms",
        "crown shell",
        "Harbor Jarl;Ice Singer;Ship Builder;Whale Scout",
        "a bone harpoon;a boarding axe;a fishing spear;a round shield with a sharpened rim",
    ),
    "Imperial": _Culture(
        "Aur Cas Max Val Tib Oct Cor Luc Reg Pris",
        "a i e o iu en",
        "tus ina ianus mere polis dium cia tora gard lium",
        "a senate of flame keepers",
        "order and public service",
        "marble forums joined by aqueducts",
        "saluting with two raised fingers",
        "solar",
        "Legate;Census Officer;Flame Keeper;Road Prefect",
        "a short sword;a heavy crossbow;a tower shield;a gilded halberd",
    ),
}
# Each of the six once, and two of them a second time.
_SECOND = ("Lorian", "Vash")

ELEMENTS = ("Aether", "Gale", "Ember", "Tide", "Stone", "Frost", "Thorn", "Shade")
_SPANS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")
_WEEKDAYS = ("Firstday", "Millday", "Bridgeday", "Saltday", "Hearthday", "Restday")
_MONTHS = (
    ("Thawmere", "spring"),
    ("Seedfall", "spring"),
    ("Brightwell", "spring"),
    ("Goldensun", "summer"),
    ("Hayloft", "summer"),
    ("Embertide", "summer"),
    ("Leafturn", "autumn"),
    ("Mistgate", "autumn"),
    ("Longnight", "winter"),
    ("Icehallow", "winter"),
)
_TERRAINS = (
    "terraced river valleys",
    "a high plateau of red grass",
    "salt marshes and lagoons",
    "black volcanic foothills",
    "pine forests around cold lakes",
    "a chain of windswept islands",
    "dry canyons with hidden springs",
    "rolling vineyards and chalk cliffs",
)
_GOODS = (
    "smoked amber;blue salt;woven kelp;copper bells;ink made from beetles;cedar oil;glass beads;"
    "dried moonfruit;felt boots;tin lanterns;quicklime;walrus ivory;silk rope;pepper bark;"
    "clay pipes;honey wax;slate tiles;bronze gears;saffron paper;whetstones;goose down;"
    "pearl buttons;juniper tar;carved chess sets"
).split(";")
_DISHES = (
    ("emberbread", "minted tea"),
    ("barley dumplings in broth", "birch beer"),
    ("smoked eel pie", "cloudberry wine"),
    ("lentil stew with lemon", "cold fig water"),
    ("roasted chestnut cakes", "spiced goat milk"),
    ("river crab with rice", "plum cider"),
    ("cheese baked in ash", "pine needle cordial"),
    ("saffron noodles", "rose sherbet"),
)
_LAWS = (
    ("no bell may ring between dusk and dawn", "a day of sweeping the market"),
    ("every well must be shared with travelers", "a fine of nine coins"),
    ("bridges must be crossed on foot", "the loss of one's saddle for a month"),
    ("no tree may be cut without planting two", "a season of planting"),
    ("all weights must be tested each spring", "the closing of the shop for a week"),
    ("strangers must be fed before they are questioned", "a public apology"),
    ("fires must be covered at the third horn", "a night on the watchtower"),
    ("letters may not be opened by anyone but the reader named", "a year without a seal"),
)
_TRANSPORTS = (
    ("sail wagon", "steady plateau winds", "twelve passengers"),
    ("stilt barge", "a crew of eight polers", "thirty passengers"),
    ("mole train", "teams of harnessed giant moles", "forty passengers"),
    ("kite ferry", "two large box kites", "six passengers"),
    ("ice sledge", "a pack of white hounds", "four passengers"),
    ("rope tram", "a waterwheel and a long cable", "ten passengers"),
    ("dune skiff", "a canvas sail and skids", "five passengers"),
    ("lantern coach", "six grey mules", "eight passengers"),
)
_MATERIALS = (
    ("skyiron", "it hums before a storm", "compass needles"),
    ("bogglass", "it bends slowly without breaking", "windows of ships"),
    ("duskwood", "it never floats", "anchors and pilings"),
    ("sunquartz", "it stays warm through the night", "bed stones"),
    ("threadstone", "it splits into fibers", "fireproof cloth"),
    ("whitebronze", "it does not tarnish in salt air", "harbor bells"),
    ("marrowclay", "it hardens only in moonlight", "temple tiles"),
    ("echo slate", "it repeats faint sounds", "theater walls"),
    ("veilsilk", "it turns clear when wet", "rain hoods"),
    ("driftcork", "it is lighter than pine smoke", "life vests"),
)
_BEASTS = (
    ("glass heron", "river minnows", "its feathers ring like cups"),
    ("tunnel ox", "pale mushrooms", "it finds its way by humming"),
    ("ember fox", "beetles", "its tail glows when it is afraid"),
    ("lagoon hare", "water reeds", "it swims with its ears"),
    ("crag goat", "lichen", "it sleeps standing on one leg"),
    ("moss bear", "berries", "ferns grow in its coat"),
    ("ribbon snake", "moths", "it ties itself in knots"),
    ("bell crow", "grain", "it copies the sound of bells"),
    ("frost seal", "silver cod", "it breathes through snow"),
    ("sand otter", "scorpions", "it digs wells"),
    ("lamp beetle", "tree sap", "it lights up in pairs"),
    ("plume lizard", "ants", "it changes color at noon"),
    ("stilt deer", "tall grass", "it steps over fences"),
    ("drum toad", "gnats", "it keeps a perfect beat"),
    ("velvet bat", "nectar", "it folds itself into a ball"),
    ("tide mole", "clams", "it wakes only at low water"),
)
_PLANTS = (
    ("moonfruit", "pale blue", "a syrup against coughs"),
    ("needle fern", "copper red", "sewing thread"),
    ("bellflower vine", "violet", "a calming tea"),
    ("salt willow", "silver", "baskets that repel insects"),
    ("ash lily", "grey with a white rim", "a soap for wool"),
    ("thunder reed", "dark green", "flutes"),
    ("honey thistle", "golden", "a bread spice"),
    ("sleeproot", "brown", "a mild sedative"),
    ("mirror leaf", "bright silver", "signal mirrors for children"),
    ("fire nettle", "scarlet", "a warming ointment"),
    ("cloud moss", "white", "mattress filling"),
    ("ink poppy", "black", "writing ink"),
    ("sweet bark", "cinnamon brown", "chewing sticks"),
    ("star clover", "yellow", "feed for racing hounds"),
    ("river bean", "speckled green", "a thick flour"),
    ("wick palm", "pale green", "candle wicks"),
)
_DOMAINS = (
    ("safe crossings", "a bridge of three arches"),
    ("the second harvest", "a sickle wrapped in wheat"),
    ("honest weights", "a balanced scale"),
    ("the hidden moon", "a veiled circle"),
    ("deep fires", "an anvil over a flame"),
    ("lost travelers", "a lantern with a door"),
    ("cold waters", "a fish biting a ring"),
    ("spoken oaths", "an open mouth of bronze"),
)
_FESTIVALS = (
    ("Lanternrun", "runners carry lights from gate to gate"),
    ("Moon Reckoning", "every debt below nine coins is forgiven"),
    ("Anvil Eve", "old tools are melted and cast anew"),
    ("the Feast of Oars", "crews race through the harbor in silence"),
    ("Kite Vigil", "families fly the names of their dead on kites"),
    ("the Salt Parade", "salt is poured in patterns along the streets"),
    ("Thornwake", "hedges are cut into the shapes of beasts"),
    ("the Ninefold Supper", "each household cooks for nine strangers"),
)
_FACTIONS = (
    ("Order of the Sealed Page", "to keep every treaty safe", "audits archives each spring"),
    ("Tidewardens' Guild", "to keep the sea lanes open", "repairs beacons and buoys"),
    ("Cinder Compact", "to control the use of fire", "licenses every furnace"),
    ("Gatewright Union", "to maintain bridges and gates", "inspects hinges and chains"),
    ("Veiled Registry", "to record all relics", "stamps each relic with a number"),
    ("Seedkeepers' League", "to save rare plants", "stores seeds in cold cellars"),
    ("Hollow Lantern Society", "to guide travelers at night", "lights the mountain roads"),
    ("Scalehand Court", "to settle trade disputes", "holds open hearings on market days"),
    ("Far Survey", "to map the unknown interior", "sends out two expeditions a year"),
    ("Quiet Choir", "to calm dangerous beasts", "trains singers for the frontier"),
)
_EMBLEMS = (
    "a closed book on a blue field;a white wave under a star;a red coal in an iron ring;"
    "two crossed keys;a blank mask;a green sprout in a jar;an empty lantern;"
    "an open hand with a scale;a compass without a needle;three silent bells"
).split(";")
_HABITS = (
    "collects broken clocks;never eats before noon;speaks to horses in rhyme;"
    "writes letters in green ink;keeps a tame bell crow;walks barefoot in the rain;"
    "memorizes maps;carves spoons while listening;hums old ferry songs;counts stairs aloud;"
    "sleeps in a hammock;answers questions with proverbs;wears two hats;"
    "plants a tree in every town;plays chess by mail;bakes bread on Restday"
).split(";")
_FORMS = (
    "orb;mask;chalice;horn;compass;mirror;loom;key;crown;hourglass;drum;lantern;dagger;bell"
).split(";")
_POWERS = (
    "calm a storm within a day's ride;show the last place a person slept;"
    "turn salt water sweet;make any lock remember its key;wake sleeping seeds;"
    "carry a voice across a valley;reveal forged seals;slow the fall of stones;"
    "keep a fire burning without fuel;erase one memory a year;weigh the truth of an oath;"
    "call lost cattle home;hide a ship in mist;heal a cracked bell"
).split(";")
_RITUALS = (
    "it must be washed in rainwater before use;it may only be lifted with the left hand;"
    "it must be addressed by its full name;nobody may whistle near it;"
    "it must rest in darkness for a week after use;two witnesses must sign for it;"
    "it may be used only on Restday"
).split(";")
_PROTOCOLS = (
    "a lead chest lined with wool;a glass case filled with dry sand;"
    "a locked niche behind a waterfall;a cedar box bound with silk rope;"
    "an iron cage hung from the ceiling;a vault with three separate keys;"
    "a stone jar sealed with wax"
).split(";")
_BOSS_KINDS = (
    "horned serpent;walking siege tower;giant moth;stone boar;drowned knight;many-eyed wolf;"
    "thorn giant;ice wyrm;brass spider;hollow king;sand leviathan;bone heron;ember bull;mist hag"
).split(";")
_LAIRS = (
    "a flooded quarry;a ruined watchtower;a burned orchard;a cave behind the tannery;"
    "a sunken temple;an abandoned mine;a ravine full of fog"
).split(";")
_KNOWN_FOR = (
    "its floating market;its school of mapmakers;its nine clock towers;its underground baths;"
    "its glass furnaces;its weekly puppet court;its echoing stairways;its hanging bridges;"
    "its public library;its pepper auctions;its night gardens;its bell foundry;"
    "its tiled harbor;its horse fair;its rope workshops;its lighthouse"
).split(";")


def make_world(seed: int = 21) -> World:
    """Returns the world of a seed: the same seed, the same world, on every machine."""
    return _Maker(seed).world()


class _Maker:
    """Draws the records, countries first, what belongs to them after."""

    def __init__(self, seed: int):
        self._seed = seed
        self._draws = Draws(seed=seed, label="virtual world")
        self._entities: dict[str, Entity] = {}
        fixed = [*ELEMENTS, *_WEEKDAYS, *_CULTURES, *(month for month, _ in _MONTHS)]
        self._names = {word.lower() for word in fixed}

    def world(self) -> World:
        draws = self._draws
        cultures = draws.sample([*_CULTURES, *_SECOND], 8)
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
        factions = [name for name, _, _ in _FACTIONS]
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
            name = "".join(self._draws.choice(part.split()) for part in parts)
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
                title = "Sovereign" if rank == 0 else self._draws.choice(style.titles.split(";"))
                people.append(
                    {
                        "name": self._name(culture, "person"),
                        "country": name,
                        "culture": culture,
                        "title": title,
                        "birthplace": self._draws.choice(cities[name]),
                        "weapon": self._draws.choice(style.weapons.split(";")),
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
        pairs = {"domain": _DOMAINS, "festival": _FESTIVALS, "dish": _DISHES, "law": _LAWS}
        tables = {name: draws.sample(items, 8) for name, items in pairs.items()}
        transports = draws.sample(_TRANSPORTS, 8)
        terrains = draws.sample(_TERRAINS, 8)
        goods = self._cycled(_GOODS, 24)
        for i, (name, culture) in enumerate(countries):
            style = _CULTURES[culture]
            domain, symbol = tables["domain"][i]
            festival, custom = tables["festival"][i]
            dish, drink = tables["dish"][i]
            law, penalty = tables["law"][i]
            vehicle, power, load = transports[i]
            deity = self._name(culture, "person")
            month, _ = draws.choice(_MONTHS)
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
                length=draws.choice(_SPANS),
                capital=cities[name][0],
            )
            self._add(
                "transport", vehicle, country=name, power=power, load=load, capital=cities[name][0]
            )

    def _add_cities(self, countries: list, cities: dict) -> None:
        fame = self._cycled(_KNOWN_FOR, 32)
        for name, culture in countries:
            for i, city in enumerate(cities[name]):
                self._add(
                    "city",
                    city,
                    country=name,
                    culture=culture,
                    known_for=fame.pop(),
                    market_day=self._draws.choice(_WEEKDAYS),
                    building=_CULTURES[culture].building,
                    rank="the capital" if i == 0 else "a provincial city",
                    gates=self._draws.choice(_SPANS),
                )

    def _add_factions(self, everywhere: list, people: list) -> None:
        seats = self._draws.sample(everywhere, len(_FACTIONS))
        founders = self._draws.sample(people[1::2], len(_FACTIONS))
        emblems = self._cycled(_EMBLEMS, len(_FACTIONS))
        for i, (name, purpose, duty) in enumerate(_FACTIONS):
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
        habits = self._cycled(_HABITS, len(people))
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
        forms, powers = self._cycled(_FORMS, 28), self._cycled(_POWERS, 28)
        for i in range(28):
            _, culture = self._draws.choice(countries)
            form = forms[i]
            maker = self._name(culture, "person")
            self._add(
                "relic",
                f"the {form.capitalize()} of {maker}",
                form=form,
                material=self._draws.choice(_MATERIALS)[0],
                power=powers[i],
                city=self._draws.choice(everywhere),
                guardian=self._draws.choice(factions),
                ritual=self._draws.choice(_RITUALS),
                storage=self._draws.choice(_PROTOCOLS),
                made=str(100 + self._draws.below(110)),
            )

    def _add_bosses(self, countries: list, everywhere: list) -> None:
        kinds, lairs = self._cycled(_BOSS_KINDS, 28), self._cycled(_LAIRS, 28)
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
                trophy=self._draws.choice(_MATERIALS)[0],
                season=self._draws.choice(("spring", "summer", "autumn", "winter")),
            )

    def _add_assets(self, names: list[str]) -> None:
        for i, (month, season) in enumerate(_MONTHS):
            self._add(
                "month",
                month,
                place=str(i + 1),
                season=season,
                days=str(33 + self._draws.below(7)),
                following=_MONTHS[(i + 1) % len(_MONTHS)][0],
            )
        homes = self._cycled(names, len(_MATERIALS) + len(_BEASTS) + len(_PLANTS))
        for name, quality, use in _MATERIALS:
            self._add("material", name, country=homes.pop(), quality=quality, use=use)
        for name, food, trait in _BEASTS:
            self._add("animal", name, country=homes.pop(), food=food, trait=trait)
        for name, color, use in _PLANTS:
            self._add("plant", name, country=homes.pop(), color=color, use=use)
