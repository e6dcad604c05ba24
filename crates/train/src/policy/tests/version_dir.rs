use super::super::*;

#[test]
fn a_changed_file_is_read_again_and_few_digests_are_remembered() {
    let parent = tempfile::tempdir().unwrap();
    let (known, dir) = (KnownDigests::default(), parent.path().join("v1"));
    assert!(known.of(&dir).is_err());
    let write = |content: &str| {
        replace_dir::<PolicyError>(&dir, |new| {
            let path = new.join(WEIGHTS_FILE);
            fs::write(&path, content).map_err(at(&path))?;
            Ok(())
        })
        .unwrap();
    };
    for content in ["one", "two"] {
        write(content);
        for _ in 0..2 {
            assert_eq!(known.of(&dir).unwrap(), adapter_digest(&dir).unwrap(), "{content}");
        }
    }
    // A digest that is not the file's own is returned while the file does not change: it is not read.
    let set = |digest: &str| known.0.lock()[0].2 = digest.to_owned();
    set("remembered");
    assert_eq!(known.of(&dir).unwrap(), "remembered");
    write("two");
    assert_eq!(known.of(&dir).unwrap(), adapter_digest(&dir).unwrap());
    for i in 0..2 * REMEMBERED {
        let other = parent.path().join(i.to_string());
        fs::create_dir(&other).unwrap();
        fs::write(other.join(WEIGHTS_FILE), i.to_string()).unwrap();
        assert_eq!(known.of(&other).unwrap(), adapter_digest(&other).unwrap());
    }
    assert_eq!(known.0.lock().len(), REMEMBERED);
    fs::remove_dir_all(&dir).unwrap();
    assert!(known.of(&dir).is_err());
}
