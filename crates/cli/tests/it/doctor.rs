//! What the doctor says of machines in all states; the GPUs are simulated.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;
use tensorferry_simgpu::install;

use crate::{folder, run, simulator, stderr, stdout, tensorferry};

/// What the tables have room for.
const COLUMNS: usize = 100;

/// The doctor with these variables, beside the arguments.
fn doctor(args: &[&str], env: &[(&str, &str)]) -> Output {
    tensorferry().arg("doctor").args(args).envs(env.iter().copied()).output().unwrap()
}

/// The document, and the exit code that came with it.
fn document(args: &[&str], env: &[(&str, &str)]) -> (Value, Option<i32>) {
    let output = doctor(&[args, &["--json"]].concat(), env);
    let document = serde_json::from_str(&stdout(&output));
    (document.unwrap_or_else(|error| panic!("{error}: {}", stderr(&output))), output.status.code())
}

fn vendor<'a>(document: &'a Value, name: &str) -> &'a Value {
    let vendors = document["gpu"]["vendors"].as_array().unwrap();
    vendors.iter().find(|vendor| vendor["vendor"] == name).unwrap()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text"))
}

/// The words of a table, without the ends of its lines.
fn unwrapped(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A folder with simulated libraries; `None` where the simulator was not built.
fn simulated(test: &str, files: &[&str]) -> Option<PathBuf> {
    let built = simulator()?;
    let folder = folder(test);
    install(&built, &folder, files).unwrap();
    Some(folder)
}

/// Which ways there are between two engines, as `from to`.
fn ways(document: &Value) -> Vec<String> {
    let paths = document["paths"].as_array().unwrap().iter();
    let moving = paths.filter(|path| path["moves"] == true && path["engines"] == "two");
    moving.map(|path| format!("{} {}", text(&path["from"]), text(&path["to"]))).collect()
}

#[test]
fn without_a_library_host_memory_moves_and_each_answer_is_told() {
    let nowhere = "/nowhere/libcuda.so.1";
    let env = [("TENSORFERRY_CUDA_LIBRARY", nowhere), ("TENSORFERRY_GPU", "cuda")];
    let (document, code) = document(&[], &env);
    assert_eq!((code, &document["ok"]), (Some(0), &Value::Bool(true)));
    assert_eq!(document["problems"], Value::Array(vec![]));
    let cuda = vendor(&document, "cuda");
    assert_eq!((&cuda["state"], &cuda["usable"]), (&"missing".into(), &false.into()));
    assert_eq!(cuda["tried"][0]["name"], nowhere);
    assert_eq!(cuda["tried"][0]["answer"], "no such file");
    let says = text(&cuda["text"]);
    assert!(says.ends_with("or name the file with TENSORFERRY_CUDA_LIBRARY"), "{says}");
    assert_eq!(cuda["settings"][0]["name"], "TENSORFERRY_GPU");
    assert_eq!(cuda["settings"][1]["value"], nowhere);
    assert_eq!(vendor(&document, "hip")["state"], "not-looked-for");
    assert_eq!(ways(&document), ["cpu cpu"]);
    let proof = &document["proofs"][0];
    assert_eq!((&proof["memory"], &proof["moved"]), (&"cpu".into(), &true.into()));
    assert_eq!(document["proofs"].as_array().unwrap().len(), 1);
}

#[test]
fn a_driver_in_the_library_path_is_found_with_its_devices() {
    let Some(folder) = simulated("doctor_driver", &["libcuda.so.1"]) else { return };
    let env = [("LD_LIBRARY_PATH", folder.to_str().unwrap())];
    let (document, code) = document(&[], &env);
    assert_eq!(code, Some(0));
    let cuda = vendor(&document, "cuda");
    assert_eq!((&cuda["state"], &cuda["usable"]), (&"ready".into(), &true.into()));
    assert_eq!(cuda["file"], folder.join("libcuda.so.1").to_str().unwrap());
    assert_eq!((&cuda["api"], &cuda["driver_version"]), (&"CUDA driver".into(), &"13.0".into()));
    assert_eq!(cuda["runtime_version"], Value::Null);
    assert_eq!(cuda["settings"], Value::Array(vec![]));
    let devices = cuda["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 2);
    assert_eq!((&devices[1]["device"], &devices[1]["ordinal"]), (&"cuda:1".into(), &1.into()));
    assert_eq!(devices[1]["memory_bytes"], 16_u64 << 30);
    assert_eq!(devices[1]["pci_address"], "0000:11:00.0");
    assert_eq!(text(&devices[1]["uuid"]).len(), 36);
    assert_eq!(ways(&document), ["cpu cpu", "cpu cuda", "cuda cpu", "cuda cuda"]);
    assert_eq!(document["proofs"].as_array().unwrap().len(), 1, "no device is used unasked");
}

#[test]
fn a_driver_without_a_device_says_so_once_and_what_to_do() {
    let Some(folder) = simulated("doctor_no_device", &["libcuda.so.1"]) else { return };
    let env = [("LD_LIBRARY_PATH", folder.to_str().unwrap()), ("SIMGPU_INIT_ERROR", "100")];
    let (found, code) = document(&[], &env);
    assert_eq!(code, Some(0), "host memory moves without it");
    let cuda = vendor(&found, "cuda");
    assert_eq!((&cuda["state"], &cuda["usable"]), (&"no-device".into(), &false.into()));
    assert_eq!(
        (&cuda["failure"]["call"], &cuda["failure"]["code"]),
        (&"cuInit".into(), &100.into())
    );
    assert_eq!(cuda["failure"]["name"], "CUDA_ERROR_NO_DEVICE");
    assert!(text(&cuda["text"]).contains("check that the device is visible here"), "{cuda}");

    let output = doctor(&["--require", "cuda"], &env);
    assert_eq!(output.status.code(), Some(1));
    let says = stderr(&output);
    assert!(says.starts_with("tensorferry: --require cuda: no device can be used: "), "{says}");
    assert!(says.contains("cuInit answered 100 CUDA_ERROR_NO_DEVICE"), "{says}");
    assert!(stdout(&output).contains("CUDA: no-device"), "{}", stdout(&output));
}

#[test]
fn a_driver_that_hangs_in_its_first_call_is_left_to_it() {
    let Some(folder) = simulated("doctor_hangs", &["libcuda.so.1", "libamdhip64.so.6"]) else {
        return;
    };
    let file = folder.join("libcuda.so.1");
    let env =
        [("LD_LIBRARY_PATH", folder.to_str().unwrap()), ("SIMGPU_INIT_DELAY_NS", "3600000000000")];
    let began = Instant::now();
    let output = doctor(&["--patience", "3", "--require", "cuda", "--move", "--json"], &env);
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    assert_eq!(output.status.code(), Some(1));
    let expected = format!(
        "CUDA does not answer: the first call of {} has not ended within 3s; if the vendor's own \
         tools hang, too, restart the driver or the machine, and until then keep engines from it \
         with TENSORFERRY_GPU=off",
        file.display()
    );
    let problem = format!("--require cuda: no device can be used: {expected}");
    assert_eq!(stderr(&output), format!("tensorferry: {problem}\n"));
    let document: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(document["problems"], Value::Array(vec![problem.into()]));
    let cuda = vendor(&document, "cuda");
    assert_eq!((&cuda["state"], &cuda["usable"]), (&"no-answer".into(), &false.into()));
    assert_eq!((text(&cuda["text"]), &cuda["file"]), (&expected[..], &file.to_str().into()));
    assert_eq!(cuda["tried"][0]["answer"], "opened");
    assert_eq!(vendor(&document, "hip")["state"], "no-answer");
    assert_eq!(proofs(&document), [("cpu", true)]);

    let output = doctor(&["--patience", "3"], &env);
    assert_eq!((output.status.code(), stderr(&output)), (Some(0), String::new()));
    let says = unwrapped(&stdout(&output));
    assert_readable(&stdout(&output));
    assert!(says.contains("CUDA: no-answer CUDA does not answer: the first call of "), "{says}");
    assert!(says.contains("any with hip none: no-answer, see above"), "{says}");
    assert!(says.ends_with("verdict host memory moves; no GPU can be used"), "{says}");
}

/// As long as a library is being opened, the loader lets no thread begin, and the process not end as usual.
#[test]
fn a_library_that_hangs_while_it_is_opened_is_left_to_it() {
    let Some(folder) = simulated("doctor_opening", &["libcuda.so.1"]) else { return };
    let (source, file) = (folder.join("hang.c"), folder.join("libamdhip64.so.6"));
    let code = "#include <unistd.h>\n\
                __attribute__((constructor)) static void hang(void) { for (;;) pause(); }\n";
    fs::write(&source, code).unwrap();
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&file).arg(source).output();
    let Ok(built) = built else { return eprintln!("skipped: cc cannot be run") };
    assert!(built.status.success(), "{}", stderr(&built));
    let env = [("LD_LIBRARY_PATH", folder.to_str().unwrap()), ("SIMGPU_DEVICES", "1")];
    let (document, code) = document(&["--patience", "4", "--move"], &env);
    assert_eq!(code, Some(1));
    assert_eq!(proofs(&document), [("cpu", true)]);
    assert_eq!(vendor(&document, "cuda")["state"], "ready");
    let hip = vendor(&document, "hip");
    assert_eq!((&hip["state"], &hip["file"]), (&"no-answer".into(), &Value::Null));
    let says = text(&hip["text"]);
    assert!(says.contains("opening its library, or another one before, has not ended"), "{says}");
    let problem = "memory of cuda:0 does not move: not tried, as no engine starts while a library is \
                   being opened";
    assert_eq!(document["problems"], Value::Array(vec![problem.into()]));
}

#[test]
fn a_file_of_garbage_is_no_library_and_no_accident() {
    let file = folder("doctor_garbage").join("libcuda.so.1");
    fs::write(&file, [0xa5; 4096]).unwrap();
    let file = file.to_str().unwrap();
    let (document, code) = document(&["--require", "gpu"], &[("TENSORFERRY_CUDA_LIBRARY", file)]);
    assert_eq!(code, Some(1));
    let cuda = vendor(&document, "cuda");
    assert_eq!((&cuda["state"], &cuda["file"]), (&"unusable".into(), &file.into()));
    assert!(text(&cuda["text"]).contains("no shared library"), "{cuda}");
    assert_eq!(document["proofs"][0]["moved"], true);
    let [problem] = &document["problems"].as_array().unwrap()[..] else { panic!("{document}") };
    assert!(text(problem).contains(file), "{problem}");
}

/// The loader would map it, and the process would be killed.
#[test]
fn a_cut_library_in_the_library_path_is_no_accident() {
    let Some(folder) = simulated("doctor_cut", &["libcuda.so.1"]) else { return };
    let file = folder.join("libcuda.so.1");
    let bytes = fs::read(&file).unwrap();
    // The good one may be shared with other tests.
    fs::remove_file(&file).unwrap();
    let len = bytes.len() / 2;
    fs::write(&file, &bytes[..len]).unwrap();
    let env = [("LD_LIBRARY_PATH", folder.to_str().unwrap()), ("TENSORFERRY_GPU", "cuda")];
    let (document, code) = document(&["--require", "cuda"], &env);
    assert_eq!(code, Some(1));
    let cuda = vendor(&document, "cuda");
    let name = file.to_str().unwrap();
    assert_eq!((&cuda["state"], &cuda["file"]), (&"unusable".into(), &name.into()));
    assert_eq!(cuda["tried"][0]["name"], name);
    let answer =
        format!("this library is cut off: it has {len} bytes, and its headers promise more");
    assert_eq!(cuda["tried"][0]["answer"], answer);

    let output = doctor(&[], &env);
    assert_eq!((output.status.code(), stderr(&output)), (Some(0), String::new()));
    let says = unwrapped(&stdout(&output));
    assert!(says.contains(&format!("{name} is no usable CUDA library: {answer}; ")), "{says}");
}

#[test]
fn files_that_were_refused_before_the_one_that_was_taken_are_told() {
    let Some(folder) = simulated("doctor_tried", &["libamdhip64.so.6"]) else { return };
    fs::write(folder.join("libamdhip64.so.7"), [0xa5; 4096]).unwrap();
    let env = [("LD_LIBRARY_PATH", folder.to_str().unwrap()), ("TENSORFERRY_GPU", "hip")];
    let (document, _) = document(&[], &env);
    let hip = vendor(&document, "hip");
    assert_eq!(hip["state"], "ready");
    let tried = hip["tried"].as_array().unwrap();
    let names: Vec<&str> = tried.iter().map(|one| text(&one["name"])).collect();
    let refused = folder.join("libamdhip64.so.7");
    let refused = refused.to_str().unwrap();
    assert_eq!(names, ["libamdhip64.so.10", refused, "libamdhip64.so.6"]);
    assert!(text(&tried[0]["answer"]).contains("cannot open shared object file"), "{hip}");
    assert_eq!(tried[1]["answer"], "this is no shared library");
    assert_eq!(tried[2]["answer"], "opened");
    let found: Vec<bool> = tried.iter().map(|one| one["found"].as_bool().unwrap()).collect();
    assert_eq!(found, [false, true, true]);
    let untried = vendor(&document, "cuda");
    assert_eq!(
        (&untried["state"], &untried["tried"]),
        (&"not-looked-for".into(), &Value::Array(vec![]))
    );

    let output = doctor(&[], &env);
    assert_readable(&stdout(&output));
    let says = unwrapped(&stdout(&output));
    let first =
        "tried libamdhip64.so.10: cannot open shared object file: No such file or directory; ";
    assert!(says.contains(first), "{says}");
    assert!(says.contains("this is no shared library; libamdhip64.so.6: opened"), "{says}");
}

#[test]
fn a_function_that_is_not_there_is_named() {
    let Some(folder) = simulated("doctor_lacking", &["libcuda.so.1"]) else { return };
    let file = folder.join("libcuda.so.1");
    let mut bytes = fs::read(&file).unwrap();
    let name = b"\0cuEventQuery\0";
    let at = bytes.windows(name.len()).position(|part| part == name).unwrap();
    bytes[at + name.len() - 2] = b'X';
    fs::write(&file, bytes).unwrap();
    let (document, _) = document(&[], &[("TENSORFERRY_CUDA_LIBRARY", file.to_str().unwrap())]);
    let cuda = vendor(&document, "cuda");
    assert_eq!(
        (&cuda["state"], &cuda["missing_function"]),
        (&"unusable".into(), &"cuEventQuery".into())
    );
    assert!(text(&cuda["text"]).contains("it lacks the function cuEventQuery; install it anew"));
}

#[test]
fn what_is_switched_off_is_not_looked_for() {
    let Some(folder) = simulated("doctor_off", &["libcuda.so.1"]) else { return };
    let env = [("LD_LIBRARY_PATH", folder.to_str().unwrap()), ("TENSORFERRY_GPU", "off")];
    let (document, code) = document(&["--require", "cuda,gpu"], &env);
    assert_eq!((code, &document["gpu"]["choice"]), (Some(1), &"off".into()));
    for name in ["cuda", "musa", "hip"] {
        assert_eq!(vendor(&document, name)["state"], "not-looked-for");
    }
    let problems = document["problems"].as_array().unwrap();
    assert_eq!(problems.len(), 2);
    let says = text(&problems[0]);
    assert!(says.ends_with("because of TENSORFERRY_GPU=off; set it to cuda or auto"), "{says}");
}

#[test]
fn a_cuda_runtime_can_be_chosen() {
    let Some(folder) = simulated("doctor_runtime", &["libcudart.so.12"]) else { return };
    let file = folder.join("libcudart.so.12");
    let env = [("TENSORFERRY_CUDA_LIBRARY", file.to_str().unwrap())];
    let (document, _) = document(&[], &env);
    let cuda = vendor(&document, "cuda");
    assert_eq!((&cuda["state"], &cuda["api"]), (&"ready".into(), &"CUDA runtime".into()));
    assert_eq!(cuda["runtime_version"], "12.9");
    assert_eq!(cuda["settings"][0]["name"], "TENSORFERRY_CUDA_LIBRARY");
}

#[test]
fn all_vendors_side_by_side() {
    let files = ["libcuda.so.1", "libmusart.so.5", "libamdhip64.so.6"];
    let Some(folder) = simulated("doctor_all", &files) else { return };
    let env = [("LD_LIBRARY_PATH", folder.to_str().unwrap()), ("SIMGPU_DEVICES", "1")];
    let (document, _) = document(&[], &env);
    for (name, api) in [("cuda", "CUDA driver"), ("musa", "MUSA runtime"), ("hip", "HIP runtime")] {
        let vendor = vendor(&document, name);
        assert_eq!((&vendor["state"], &vendor["api"]), (&"ready".into(), &api.into()));
        assert_eq!(vendor["devices"][0]["device"], format!("{name}:0"));
    }
    assert_eq!(ways(&document).len(), 16);
    let output = doctor(&[], &env);
    assert_readable(&stdout(&output));
}

/// Whose memory was moved, and whether it arrived.
fn proofs(document: &Value) -> Vec<(&str, bool)> {
    let proofs = document["proofs"].as_array().unwrap().iter();
    proofs.map(|proof| (text(&proof["memory"]), proof["moved"].as_bool().unwrap())).collect()
}

#[test]
fn memory_of_devices_is_moved_when_that_is_asked_for() {
    let Some(folder) = simulated("doctor_move", &["libcuda.so.1", "libamdhip64.so.6"]) else {
        return;
    };
    let env = [("LD_LIBRARY_PATH", folder.to_str().unwrap())];
    let (all, code) = document(&["--move"], &env);
    assert_eq!(code, Some(0), "{all}");
    let moved =
        [("cpu", true), ("cuda:0", true), ("cuda:1", true), ("hip:0", true), ("hip:1", true)];
    assert_eq!(proofs(&all), moved);
    let (one, code) = document(&["--require", "hip", "--require", "gpu"], &env);
    assert_eq!(code, Some(0), "{one}");
    assert_eq!(proofs(&one), [("cpu", true), ("hip:0", true), ("cuda:0", true)]);
}

#[test]
fn a_device_whose_memory_does_not_move_is_a_problem() {
    let Some(folder) = simulated("doctor_full", &["libcuda.so.1"]) else { return };
    let library = [("LD_LIBRARY_PATH", folder.to_str().unwrap()), ("TENSORFERRY_GPU", "cuda")];
    let fails = |what| [&library[..], &[("SIMGPU_FAIL", what)]].concat();
    for args in [&["--move"], &["--require=cuda"]] {
        let (document, code) = document(args, &fails("cuMemHostAlloc:*:2"));
        assert_eq!(code, Some(1));
        assert_eq!(proofs(&document), [("cpu", true), ("cuda:0", false), ("cuda:1", false)]);
        let problem = text(&document["problems"][0]);
        assert!(problem.contains("memory of cuda:0 does not move: "), "{problem}");
        assert!(
            problem.contains("cuMemHostAlloc answered 2 CUDA_ERROR_OUT_OF_MEMORY"),
            "{problem}"
        );
    }
    // One that works is enough for what is required, but not for --move.
    let first = fails("cuMemAlloc_v2:1:2");
    let (document, code) = document(&["--require", "cuda"], &first);
    assert_eq!(code, Some(0), "{document}");
    assert_eq!(proofs(&document), [("cpu", true), ("cuda:0", false), ("cuda:1", true)]);
    assert_eq!(doctor(&["--move"], &first).status.code(), Some(1));
}

#[test]
fn an_address_that_is_not_of_this_machine_is_a_problem() {
    let env = [("TENSORFERRY_BIND", "192.0.2.1"), ("TENSORFERRY_GPU", "off")];
    let output = doctor(&[], &env);
    assert_eq!(output.status.code(), Some(1));
    let says = stderr(&output);
    let expected =
        "tensorferry: host memory does not move: no engine starts: listening on 192.0.2.1";
    assert!(says.starts_with(expected), "{says}");
    let (document, _) = document(&[], &env);
    assert_eq!((&document["ok"], &document["proofs"][0]["moved"]), (&false.into(), &false.into()));
    assert_eq!(document["addresses"]["bind"], "192.0.2.1");
    assert_eq!(document["sockets"]["ports"]["free"], 0);
    let host = &document["addresses"]["hosts"][0];
    assert!(text(&host["error"]).starts_with("listening on 192.0.2.1"), "{host}");
}

#[test]
fn a_range_without_room_is_a_problem_that_names_it() {
    // One port, and an engine needs two.
    let env = [("TENSORFERRY_PORTS", "15999-15999"), ("TENSORFERRY_GPU", "off")];
    let (document, code) = document(&[], &env);
    assert_eq!(code, Some(1));
    assert!(text(&document["problems"][0]).contains("15999-15999"), "{document}");
    assert!(text(&document["advice"][0]).contains("choose another range with TENSORFERRY_PORTS"));
}

#[test]
fn settings_are_shown_with_what_had_no_effect() {
    let env = [
        ("TENSORFERRY_GPU", "off"),
        ("TENSORFERRY_BINDD", "10.0.0.1"),
        ("TENSORFERRY_SIMULATOR", "/opt/sim/libtensorferry_simgpu.so"),
        ("MC_TCP_LANES_PER_PEER", "99"),
        ("MC_GID_INDEX", "3"),
        ("MC_REDIS_PASSWORD", "hunter2"),
    ];
    let output = doctor(&["--json"], &env);
    assert_eq!(stderr(&output), "", "what is in the document is not logged as well");
    let document: Value = serde_json::from_str(&stdout(&output)).unwrap();
    let settings = &document["settings"];
    assert_eq!(settings["environment"].as_array().unwrap().len(), env.len());
    let warnings = settings["warnings"].to_string();
    assert!(warnings.contains("TENSORFERRY_BINDD is no setting"), "{warnings}");
    assert!(!warnings.contains("SIMULATOR"), "the demo's own variable: {warnings}");
    assert!(warnings.contains("MC_TCP_LANES_PER_PEER=99: expected a count"), "{warnings}");
    assert!(settings["without_effect"].to_string().contains("MC_GID_INDEX"), "{settings}");
    let output = doctor(&[], &env);
    assert!(!stdout(&output).contains("hunter2"));
    assert_readable(&stdout(&output));
}

#[test]
fn the_sections_are_readable_and_end_with_the_verdict() {
    let output = run(&["doctor"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    assert_readable(&text);
    for part in ["GPU libraries", "Sockets and limits", "15000-17000", "127.0.0.1", "In short"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let last = text.lines().rfind(|line| !line.trim().is_empty()).unwrap();
    assert!(last.contains("verdict") && last.contains("host memory moves"), "{last}");
}

#[test]
fn what_cannot_be_required_is_refused() {
    for args in [&["doctor", "--require", "npu"][..], &["doctor", "--require", ""]] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains("cuda, musa, hip, or gpu for any"), "{}", stderr(&output));
    }
}

/// The names in a document, wherever they are.
fn names(value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(parts) => parts.iter().for_each(|(name, part)| {
            found.insert(name.clone());
            names(part, found);
        }),
        Value::Array(parts) => parts.iter().for_each(|part| names(part, found)),
        _ => {}
    }
}

#[test]
fn every_name_of_the_document_is_described() {
    let Some(folder) = simulated("doctor_names", &["libcuda.so.1", "libamdhip64.so.6"]) else {
        return;
    };
    let env = [
        ("LD_LIBRARY_PATH", folder.to_str().unwrap()),
        ("SIMGPU_FAIL", "hipGetDeviceCount:*:100"),
        ("TENSORFERRY_MUSA_LIBRARY", "/nowhere/libmusart.so"),
    ];
    let mut found = BTreeSet::new();
    names(&document(&[], &env).0, &mut found);
    assert!(found.contains("answer") && found.contains("pci_address") && found.contains("call"));
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/doctor.md");
    let page = fs::read_to_string(page).unwrap();
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words: BTreeSet<&str> = page.split(|c| !is_name(c)).collect();
    let missing: Vec<&String> =
        found.iter().filter(|name| !words.contains(name.as_str())).collect();
    assert!(missing.is_empty(), "docs/doctor.md does not say what {missing:?} are");
}

/// No line is wider than a terminal, unless one word is.
fn assert_readable(text: &str) {
    for line in text.lines() {
        let longest_word = line.split_whitespace().map(|word| word.chars().count()).max();
        let wide = line.chars().count() > COLUMNS && longest_word.unwrap_or(0) < COLUMNS / 2;
        assert!(!wide, "{line}");
    }
}
