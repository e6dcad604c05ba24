//! `[dataset]`.

use std::path::Path;

use insta::assert_snapshot;

use hone_dataset::DatasetConfig;

use crate::parse;

fn error(text: &str) -> String {
    parse(text).unwrap_err().to_string()
}

#[test]
fn a_path_sets_the_dataset() {
    assert_eq!(parse("").unwrap().dataset_in_use(), None);
    let config = parse("[dataset]\nseed = 3\npath = 'a.csv'").unwrap();
    let plain = DatasetConfig::at(Path::new("a.csv"));
    assert_eq!(config.dataset_in_use(), Some(&DatasetConfig { seed: 3, ..plain }));
}

#[test]
fn a_full_table_round_trips() {
    let text = "[dataset]\nfew_shot = [{ user = '1+1', assistant = '2' }]\n\
        [[dataset.stage]]\nsteps = 5\nfilter = 'level = \"easy\"'\nlearning_rate_scale = 2\n\
        [[dataset.stage]]\nmax_difficulty = 0.5\nroute = 'default'\nlearning_rate = 1e-5";
    let config = parse(text).unwrap();
    assert_eq!(config.dataset.stages.len(), 2);
    assert_eq!(parse(&toml::to_string(&config).unwrap()).unwrap(), config);
}

#[test]
fn errors_name_the_key() {
    let dataset = |line: &str| error(&format!("[dataset]\n{line}"));
    assert_snapshot!(dataset("paht = 'a'"), @"dataset.paht is not a key: did you mean dataset.path?");
    assert_snapshot!(dataset("held_out = 2.5"), @"dataset.held_out is 2.5: it must be a share less than 1 or a whole number of prompts");
    assert_snapshot!(dataset("held_out = -0.1"), @"dataset.held_out is -0.1: it must be a finite number, 0 or more");
    assert_snapshot!(dataset("held_out = 0.1\neval_path = 'b'"), @"dataset.held_out is 0.1: it must be 0 beside dataset.eval_path, which holds the prompts that are held out");
    assert_snapshot!(dataset("prompt_column = ''"), @r#"dataset.prompt_column is "": it must be a column's name"#);
    assert_snapshot!(dataset("prompt_column = 'messages'"), @r#"dataset.prompt_column is "messages": it must be another column than dataset.messages_column"#);
    assert_snapshot!(dataset("answer_column = 'prompt'"), @r#"dataset.answer_column is "prompt": it must be another column than those of the prompt"#);
    assert_snapshot!(dataset("answer_column = ''\nextract_answer = '####'"), @r#####"dataset.extract_answer is "####": it must be empty without dataset.answer_column, the column that it reads"#####);
    assert_snapshot!(dataset("mix.live_share = 1.5"), @"dataset.mix.live_share is 1.5: it must be from 0 to 1");
    assert_snapshot!(dataset("few_shot = [{ user = 'a' }]"), @"dataset.few_shot[0].assistant is missing");
    let stage = |line: &str| error(&format!("[[dataset.stage]]\n{line}"));
    assert_snapshot!(stage("[[dataset.stage]]"), @"dataset.stage[0].steps is 0: it must be 1 or more: only the last stage may have no end");
    assert_snapshot!(stage("route = 'x'"), @r#"dataset.stage[0].route is "x": it must be the name of a route"#);
    assert_snapshot!(stage("max_difficulty = 2"), @"dataset.stage[0].max_difficulty is 2: it must be from 0 to 1");
    assert_snapshot!(stage("learning_rate = 0"), @"dataset.stage[0].learning_rate is 0: it must be greater than 0");
    assert_snapshot!(stage("learning_rate = 1e-5\nlearning_rate_scale = 2"), @"dataset.stage[0].learning_rate_scale is 2: it must be absent beside learning_rate");
    assert_snapshot!(stage("fliter = ''"), @"dataset.stage[0].fliter is not a key: did you mean dataset.stage[0].filter?");
}
