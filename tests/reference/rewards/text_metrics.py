"""Writes text_metrics.json: the Python libraries' scores of pairs of texts, and nltk's stems.

    python tests/reference/rewards/text_metrics.py

Needs nltk, rouge-score, rapidfuzz, sacrebleu and scikit-learn. nltk's METEOR uses a WordNet without
words, because no corpus is downloaded. GLEU, METEOR and cosine use sacrebleu's 13a tokens.
"""

import json
import random
import sys
from pathlib import Path

import rapidfuzz
import sacrebleu
from nltk.stem.porter import PorterStemmer
from nltk.translate.gleu_score import sentence_gleu
from nltk.translate.meteor_score import single_meteor_score
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.metrics.pairwise import cosine_similarity

sys.path.append(str(Path(__file__).resolve().parents[1]))
from provenance import made_by  # noqa: E402

OUT = Path(__file__).with_name("text_metrics.json")
split_13a = Tokenizer13a()
rouge = RougeScorer([f"rouge{n}" for n in range(1, 6)] + ["rougeL"], use_stemmer=False)


class NoWords:
    """A WordNet in which no word has a synonym."""

    def synsets(self, _word: str) -> list:
        return []


def tokens(text: str) -> list[str]:
    return split_13a(text.rstrip()).split()


def cosine(candidate: str, reference: str) -> float:
    count = CountVectorizer(tokenizer=tokens, token_pattern=None, lowercase=True)
    try:
        counts = count.fit_transform([candidate, reference])
    except ValueError:  # no word in either text
        return 0.0
    return float(cosine_similarity(counts[0], counts[1])[0, 0])


def metrics(candidate: str, reference: str) -> dict[str, float]:
    given, wanted = tokens(candidate), tokens(reference)
    lines = rouge.score(reference, candidate)
    found = {
        "cosine": cosine(candidate, reference),
        "fuzzy_match": rapidfuzz.fuzz.ratio(candidate, reference) / 100,
        "bleu": sacrebleu.sentence_bleu(candidate, [reference]).score / 100,
        "gleu": sentence_gleu([wanted], given),
        "meteor": single_meteor_score(wanted, given, wordnet=NoWords()),
        "rouge_l": lines["rougeL"].fmeasure,
    }
    return found | {f"rouge_{n}": lines[f"rouge{n}"].fmeasure for n in range(1, 6)}


FOX = "The quick brown fox jumps over the lazy dog."
PAIRS = [
    (FOX, FOX),
    (FOX, "The quick brown dog jumps on the log."),
    (FOX, "the quick brown fox jumps over the lazy dog"),
    (FOX, FOX.upper()),
    (FOX, "Pack my box with five dozen liquor jugs!"),
    ("", ""),
    ("", FOX),
    (FOX, ""),
    (" \n\t ", FOX),
    (FOX, "..."),
    ("...", "..."),
    ("!?", "?!"),
    ("a", "a"),
    ("a", "b"),
    ("a b", "a b"),
    ("a b c", "c b a"),
    ("the the the the the the the", "the cat is on the mat"),
    ("the cat is on the mat", "the the the the the the the"),
    ("ab ab ab ab ab", "ab ab ab"),
    ("x y x y x y x y", "y x y x y x y x"),
    ("fuzzy wuzzy had no hair", "fuzzy wuzzy was a bear"),
    ("fuzzy wuzzy was a bear", "wuzzy fuzzy was a bear"),
    ("It is a guide to action which ensures that the military always obeys the commands of the party",
     "It is a guide to action that ensures that the military will forever heed Party commands"),
    ("It is to insure the troops forever hearing the activity guidebook that party direct",
     "It is a guide to action that ensures that the military will forever heed Party commands"),
    ("He runs, she is running; they ran.", "He run, she ran; they are running."),
    ("The relational databases were happily normalised", "Relate a database: normalising happiness"),
    ("flies dying skies news innings proceed", "fly die sky new inning proceeding"),
    ("Babies cried and tried; spies spied, flying.", "A baby cries and tries; a spy spying flies."),
    ("geology theology apology analogously", "geological theologies apologies analogous"),
    ("controlling controlled rolling rolled hopping hoped", "control controls roll rolls hop hope"),
    ("The answer is 42.", "42"),
    ("The answer is 1,234.50 dollars.", "1234.5"),
    ("3.14 is not 3,14 nor 3. 14", "3.14 is 3,14 or 3 .14"),
    ("2024-01-31 and 10-20-30", "2024 - 01 - 31 and 10 20 30"),
    ("well-known state-of-the-art", "well known state of the art"),
    ("It costs $5 (five dollars), i.e. 5% more.", "It costs $ 5, five dollars; 5 % more!"),
    ("Tom &amp; Jerry &lt;3 &quot;cheese&quot; &gt; all", 'Tom & Jerry <3 "cheese" > all'),
    ("&amp;lt; twice", "< twice"),
    ("a <skipped> b", "a b"),
    ("hyphen-\nation at a line's end", "hyphenation at a line's end"),
    ("one\ntwo\r\nthree\tfour", "one two three four"),
    ("trailing dash -\n", "trailing dash -"),
    ("don't can't won't it's", "do not can not will not it is"),
    ("email: jo.doe@example.com, see http://example.com/a?b=c&d=e", "jo.doe@example.com"),
    ("def f(x): return x**2 + [1, 2][0]", "def g(y):\n    return y ** 2 + [1,2][0]"),
    ('{"name": "John", "age": 30}', '{"age": 30, "name": "John"}'),
    ("..,,..a.b,c.1.d,2,e", "..,,..a . b , c . 1 . d , 2 , e"),
    ("Ünïcödé wörds ÄRE früh", "ünïcödé Wörds äre früher"),
    ("naïve café déjà vu", "naive cafe deja vu"),
    ("日本語のテキスト、です。", "日本語の文章、です。"),
    ("Привет, мир! Как дела?", "Привет мир, как дела"),
    ("ΟΔΟΣ ΟΔΥΣΣΕΥΣ Σ", "οδος οδυσσευς σ"),
    ("emoji 👩‍👩‍👧 🎉🎉 done", "emoji 👩‍👩‍👧 🎉 done"),
    ("İstanbul ﬁne Straße \u212a", "istanbul fine STRASSE K"),
    ("no\u00a0break\u2003space\u3000here\x1cand\x85there", "no break space here and there"),
    ("e\u0301 combining", "\u00e9 combining"),
    ("yyyy yes syzygy toy by ivy", "yyy y syzygies toys buy ivies"),
    ("aaa bbb ccc ddd eee fff ggg", "aaa bbb xxx ddd eee fff yyy"),
]

WORDS = """caresses ponies ties caress cats flies dies lies skies sky news innings feed agreed
plastered bled motoring sing conflated troubled sized hopping tanned falling hissing fizzed failing
filing happy enjoy enjoyment spy spied try tried died say yes by ivy relational conditional rational
valency hesitancy digitizer conformably radically nationally rationally basically differently vilely
analogously vietnamization predication operator feudalism decisiveness hopefulness callousness
formality sensitivity sensibility hopefully fully geology theology archaeology apology apologies logi
triplicate formative formalize electricity electrical hopeful goodness revival allowance inference
airliner gyroscopic adjustable defensible irritant replacement adjustment dependent adoption
homologous communism activate angularity effective bowdlerize probate rate cease controlling roll
rolled rolling control oed ing ings aing king bring string winged using used user as is us be bee bees
seeing freed need needed succeed proceeds exceeds howe howes dying lying tying outing cannings
canning generously general generic generation university universal universe engineering engineer
organization organisation organize connect connected connection connections connective multiply
multidimensional oscillators relate relativity abilities possibly probably terribly edible ill all
illness shell shelling shelled add adding added egg egged off buzzed fuzzy lazily laziness sss ss ies
ied eed ion tion station nation ration lotion onion union unions million yyyy yyy toy toys syzygy
syzygies boys boying boyed playing played plays player naïve naïvely cafés éé ééing aéed über straße
x2 3d 1990s 42nd c++ o'clock can't""".split()


def long_pairs() -> list[tuple[str, str]]:
    """Texts of about 4 kB: similar, shuffled and of unequal length."""
    dice = random.Random(7)
    common = "the of and to in a is that for it as was with be by on not he his but at are".split()
    rare = [w for w in WORDS if w.isascii() and w.isalpha()]
    words = [dice.choice(common if dice.random() < 0.4 else rare) for _ in range(640)]
    edited = [dice.choice(rare) if dice.random() < 0.2 else word for word in words]
    shuffled = dice.sample(words, len(words))
    return [
        (" ".join(words), " ".join(edited)),
        (" ".join(words), " ".join(shuffled)),
        (" ".join(words[:80]), " ".join(words)),
    ]


def main() -> None:
    packages = ("nltk", "rapidfuzz", "rouge-score", "sacrebleu", "scikit-learn")
    origin = json.dumps(made_by(*packages))
    cases = [
        {"candidate": candidate, "reference": reference, **metrics(candidate, reference)}
        for candidate, reference in PAIRS + long_pairs()
    ]
    stems = {word: PorterStemmer().stem(word) for word in WORDS}
    rows = ",\n  ".join(json.dumps(case, ensure_ascii=False) for case in cases)
    text = f'{{"made_by": {origin},\n"cases": [\n  {rows}\n],\n"stems": {json.dumps(stems, ensure_ascii=False)}}}\n'
    OUT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
