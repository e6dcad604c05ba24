"""Writes datasets/capitals.csv: a knowledge base of questions and expert answers.

    python tests/reference/datasets/capitals_dataset.py

Needs only Python. The columns are those of the GRPO guides: `question` and `expert_answer`.
"""

import csv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CAPITALS = {
    "Argentina": "Buenos Aires", "Australia": "Canberra", "Austria": "Vienna", "Belgium": "Brussels",
    "Brazil": "Brasília", "Bulgaria": "Sofia", "Canada": "Ottawa", "Chile": "Santiago",
    "Colombia": "Bogotá", "Croatia": "Zagreb", "Cuba": "Havana", "Denmark": "Copenhagen",
    "Ecuador": "Quito", "Egypt": "Cairo", "Estonia": "Tallinn", "Ethiopia": "Addis Ababa",
    "Finland": "Helsinki", "France": "Paris", "Germany": "Berlin", "Ghana": "Accra",
    "Greece": "Athens", "Hungary": "Budapest", "Iceland": "Reykjavík", "India": "New Delhi",
    "Indonesia": "Jakarta", "Iran": "Tehran", "Ireland": "Dublin", "Italy": "Rome",
    "Japan": "Tokyo", "Kenya": "Nairobi", "Latvia": "Riga", "Mexico": "Mexico City",
    "Morocco": "Rabat", "Nepal": "Kathmandu", "New Zealand": "Wellington", "Norway": "Oslo",
    "Pakistan": "Islamabad", "Peru": "Lima", "Poland": "Warsaw", "Portugal": "Lisbon",
    "Romania": "Bucharest", "Spain": "Madrid", "Sweden": "Stockholm", "Thailand": "Bangkok",
    "Turkey": "Ankara", "Ukraine": "Kyiv", "Uruguay": "Montevideo", "Vietnam": "Hanoi",
}  # fmt: skip


def main() -> None:
    with (ROOT / "datasets" / "capitals.csv").open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["question", "expert_answer"])
        for country, capital in CAPITALS.items():
            out.writerow([f"What is the capital of {country}?", f"The capital of {country} is {capital}."])


if __name__ == "__main__":
    main()
