"""The words that fill the templates: names, places, things, and made-up words nobody has seen before."""

from random import Random


def listed(text: str) -> tuple[str, ...]:
    """Return the words of a text, in order."""
    return tuple(text.split())


NAMES = listed(
    """Anna Ben Clara David Elena Farid Grace Hugo Ines Jonas Kira Liam Maya Noah Olga Pedro Quinn Rosa Sami Tara Umar
    Vera Walter Xenia Yusuf Zoe Ada Boris Carmen Dina Emil Fatima Georg Hana Ivan Julia Karim Lena Marco Nadia
    Oscar Paula Rafael Sofia Tom Ursula Victor Wanda Yara Zeno Alma Bruno Cora Dario Edith Felix Gina Henry Ida
    Jakob Kofi Lucia Milan Nora Otto Petra Ravi Silas Theo Uma Vito Wim Yuki Amir Bella Cyrus Dora Elias Fiona
    Gustav Helen Igor Jana Kurt Lara Mona Nils Omar Pia Ruth Stefan Tina Vlad Willa Yann Aisha Bjorn Celia Diego
    Esther Franz Greta Hector Iris Jan Katya Louis Mira Nuno Olive Pavel Rita Simon Tessa Viktor Zara Alan Beth
    Carl Dean Ella Fred Gail Hank Isla Jack Kate Luke Mary Neil Opal Paul Rose Sean Tess Vince Wes Amy Bob Cleo"""
)
CITIES = listed(
    """Oslo Lisbon Vienna Cairo Lima Tokyo Seoul Delhi Rome Paris Berlin Madrid Dublin Athens Prague Warsaw Zurich
    Geneva Boston Austin Denver Toronto Quito Accra Lagos Nairobi Tunis Rabat Beirut Amman Doha Muscat Hanoi
    Manila Jakarta Perth Sydney Hobart Auckland Turin Milan Naples Porto Seville Bilbao Lyon Nantes Ghent Bruges
    Utrecht Bergen Malmo Turku Riga Vilnius Tallinn Minsk Sofia Zagreb Split Graz Linz Bern Basel Leeds York
    Bath Cork Galway Bonn Bremen Kiel Dresden Leipzig Krakow Gdansk Brno Kyoto Osaka Busan Taipei Mumbai Chennai
    Havana Bogota Santiago Montreal Halifax Chicago Dallas Miami Seattle"""
)
COLOURS = listed(
    """red blue green yellow orange purple pink brown black white grey gold silver turquoise crimson violet"""
)
ANIMALS = listed(
    """fox owl bear hare mouse otter heron badger squirrel hedgehog cat dog horse goat duck goose turtle frog lizard
    wolf deer beaver raven sparrow robin swan donkey sheep pony rabbit whale dolphin seal penguin crab snail bee
    ant spider moth tiger lion zebra camel llama monkey parrot crow eagle falcon"""
)
FRUITS = listed(
    """apples pears plums cherries grapes lemons oranges bananas figs dates mangoes melons peaches limes kiwis"""
)
THINGS = listed(
    """lamp chair table book pencil cup plate spoon bottle basket mirror clock key door window carpet pillow blanket
    candle box bag hat coat scarf shoe glove belt ring watch coin stamp letter map compass rope ladder hammer
    nail saw brush bucket kettle pan bowl knife fork drum flute violin piano guitar bell kite ball doll puzzle
    bicycle boat wagon sled tent lantern umbrella camera radio phone screen keyboard cable battery magnet wheel
    engine stone shell feather leaf flower seed branch log brick tile pipe wire thread needle button"""
)
ADJECTIVES = listed(
    """small large old new quiet loud bright dark warm cold soft hard heavy light quick slow clean dusty round flat
    tall short wide narrow empty full sweet bitter gentle brave clever curious happy sleepy hungry patient
    wooden golden silver broken shiny smooth rough deep shallow early late plain strange famous hidden lonely
    busy calm careful cheerful fresh dry wet"""
)
VERBS = listed(
    """walks runs jumps sings sleeps waits looks listens laughs smiles dances swims climbs hides turns stops starts
    moves sits stands falls shines grows opens closes rings breaks melts floats spins wins loses"""
)
PLACES = listed(
    """garden forest river hill valley village market harbour station library kitchen school museum bridge tower island
    beach field barn cellar attic street square park lake mountain desert cave workshop bakery theatre hospital
    office castle mill farm meadow"""
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = listed("""January February March April May June July August September October November December""")
ACCENTED = listed("""café naïve über señor façade jalapeño Zürich Malmö crème piñata Ångström déjà smörgås São élan""")
SYMBOLS = listed("""→ ✓ € £ ° ± × ≤ ≥ π λ Δ 🙂 🚀 🎉 🌍 🔥 ⭐ 日本 東京 привет мир""")

_ONSETS = listed("""b br c ch d dr f fl g gr h j k kl l m n p pl qu r s sh sk st t tr v w z""")
_VOWELS = listed("""a e i o u ai ee oo ou""")
_CODAS = ("", "", "", "n", "r", "s", "t", "l", "m", "k", "nd", "x")


def made_up_word(random: Random) -> str:
    """Make a word of two or three syllables that means nothing."""
    syllables = (
        random.choice(_ONSETS) + random.choice(_VOWELS) + random.choice(_CODAS) for _ in range(random.choice((2, 2, 3)))
    )
    return "".join(syllables)


def made_up_name(random: Random) -> str:
    """Make a name that means nothing."""
    return made_up_word(random).capitalize()


def name(random: Random) -> str:
    """Choose a name; now and then one that nobody has."""
    return made_up_name(random) if random.random() < 0.2 else random.choice(NAMES)


def city(random: Random) -> str:
    """Choose a city; now and then one that is not on any map."""
    return made_up_name(random) if random.random() < 0.15 else random.choice(CITIES)


def word(random: Random) -> str:
    """Choose any one word in lower case."""
    if random.random() < 0.2:
        return made_up_word(random)
    return random.choice(random.choice((COLOURS, ANIMALS, FRUITS, THINGS, ADJECTIVES, VERBS, PLACES)))


def code(random: Random) -> str:
    """Make a code of letters and digits, such as `KX-4071`."""
    letters = "".join(random.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(random.choice((1, 2, 2, 3))))
    digits = "".join(random.choice("0123456789") for _ in range(random.randint(2, 5)))
    return random.choice((letters + digits, f"{letters}-{digits}", digits))


def with_article(noun: str) -> str:
    """Put `a` or `an` before a noun."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
