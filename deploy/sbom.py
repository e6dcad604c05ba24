#!/usr/bin/env python3
"""Writes what a binary of Hone contains: an SBOM in CycloneDX 1.5, and the licences of all crates.

    python3 deploy/sbom.py --target x86_64-unknown-linux-gnu --sbom FILE --licences FILE

Both come from `cargo metadata`, restricted to what the binary `hone` links on the target: build scripts and tests
are left out. Needs the crates' sources, which any build has fetched.
"""

import argparse
import hashlib
import json
import subprocess
from pathlib import Path


def packages(target):
    """The package `hone`, and the packages that it links, with the edges between them."""
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", target]
    metadata = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    known = {package["id"]: package for package in metadata["packages"]}
    edges = {
        node["id"]: sorted(
            dep["pkg"] for dep in node["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])
        )
        for node in metadata["resolve"]["nodes"]
    }
    (root,) = [package["id"] for package in metadata["packages"] if package["name"] == "hone"]
    reached, waiting = set(), [root]
    while waiting:
        package = waiting.pop()
        if package not in reached:
            reached.add(package)
            waiting.extend(edges[package])
    return known, {package: edges[package] for package in sorted(reached)}, root


def checksums():
    """The SHA-256 of each crate's archive, from Cargo.lock, by name and version."""
    found, name, version = {}, "", ""
    for line in Path("Cargo.lock").read_text().splitlines():
        key, _, value = line.partition(" = ")
        if key == "name":
            name = value.strip('"')
        elif key == "version":
            version = value.strip('"')
        elif key == "checksum":
            found[name, version] = value.strip('"')
    return found


def component(package, sums, kind="library"):
    purl = f"pkg:cargo/{package['name']}@{package['version']}"
    entry = {"type": kind, "bom-ref": purl, "name": package["name"], "version": package["version"], "purl": purl}
    if package["description"]:
        entry["description"] = " ".join(package["description"].split())
    if package["license"]:
        entry["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
    if digest := sums.get((package["name"], package["version"])):
        entry["hashes"] = [{"alg": "SHA-256", "content": digest}]
    return entry


def sbom(known, edges, root):
    sums = checksums()
    purl = {identity: component(known[identity], sums)["purl"] for identity in edges}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": component(known[root], sums, "application")},
        "components": [component(known[identity], sums) for identity in edges if identity != root],
        "dependencies": [
            {"ref": purl[identity], "dependsOn": sorted({purl[to] for to in edges[identity]})}
            for identity in edges
        ],
    }


def licences(known, edges):
    """Every licence text once, with the crates that have it; for crates without a text, their expression."""
    texts, without = {}, []
    for package in (known[identity] for identity in edges):
        name, folder = f"{package['name']} {package['version']}", Path(package["manifest_path"]).parent
        files = sorted(
            file
            for file in folder.iterdir()
            if file.is_file() and file.name.upper().startswith(("LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"))
        )
        if not files:
            without.append(f"{name}: {package['license']}")
        for file in files:
            text = file.read_text(errors="replace").strip()
            digest = hashlib.sha256("".join(text.split()).encode()).hexdigest()
            texts.setdefault(digest, (text, []))[1].append(name)
    parts = [", ".join(names) + "\n\n" + text for text, names in texts.values()]
    return ("\n\n" + "-" * 80 + "\n").join([*parts, "Crates without a licence text:\n\n" + "\n".join(without)]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="platform whose dependencies are listed")
    parser.add_argument("--sbom", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--licences", type=Path, required=True, help="text file to write")
    arguments = parser.parse_args()
    known, edges, root = packages(arguments.target)
    arguments.sbom.write_text(json.dumps(sbom(known, edges, root), indent=1) + "\n")
    arguments.licences.write_text(licences(known, edges))


if __name__ == "__main__":
    main()
