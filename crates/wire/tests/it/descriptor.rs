//! Descriptors as other writers might make them, and as they are cut.

use std::fmt::Write as _;

use tensorferry_wire::{
    BufferDescriptor, DEFAULT_SEND_LIMIT, FerryKey, SegmentDescriptor, WireError,
};

const TYPE_LEN: usize = 1;

fn parse(json: &str) -> Result<SegmentDescriptor, WireError> {
    SegmentDescriptor::parse(json.as_bytes())
}

fn refusal(json: &str) -> String {
    match parse(json) {
        Err(WireError::Shape { what }) => what,
        other => panic!("{json} gave {other:?}"),
    }
}

fn descriptor(buffers: u64) -> SegmentDescriptor {
    SegmentDescriptor {
        name: "10.0.0.1:15000".to_owned(),
        buffers: (1..=buffers)
            .map(|n| BufferDescriptor { addr: n * 4096, len: 64 + n % 7 })
            .collect(),
        tcp_data_host: Some("10.0.0.1".to_owned()),
        tcp_data_port: 15001,
        tcp_proto_version: 2,
        timestamp: "2026-11-30 08:42:14.659060".to_owned(),
        tensorferry: Some(FerryKey {
            version: "0.1.0".to_owned(),
            incarnation: 0xbeef,
            buffers_truncated: false,
        }),
        ..SegmentDescriptor::default()
    }
}

#[test]
fn the_own_key_stands_in_byte_order() {
    let json = descriptor(1).to_json(DEFAULT_SEND_LIMIT).json;
    let text = concat!(
        r#"{"buffers":[{"addr":4096,"length":65,"name":"10.0.0.1:15000"}],"#,
        r#""name":"10.0.0.1:15000","protocol":"tcp","rdma_server_name":"","#,
        r#""tcp_data_host":"10.0.0.1","tcp_data_port":15001,"tcp_proto_version":2,"#,
        r#""tensorferry":{"incarnation":"000000000000beef","version":"0.1.0"},"#,
        r#""timestamp":"2026-11-30 08:42:14.659060"}"#,
        "\n"
    );
    assert_eq!(str::from_utf8(&json), Ok(text));
    assert_eq!(SegmentDescriptor::parse(&json), Ok(descriptor(1)));
}

#[test]
fn only_the_protocol_is_required() {
    assert_eq!(parse(r#"{"protocol":"tcp"}"#), Ok(SegmentDescriptor::default()));
    let nulls = r#"{"buffers":null,"name":null,"protocol":"tcp","tcp_data_host":null,
        "tcp_data_port":null,"tcp_proto_version":null,"tensorferry":null,"timestamp":null}"#;
    assert_eq!(parse(nulls), Ok(SegmentDescriptor::default()));
    let default = SegmentDescriptor::default();
    assert_eq!(SegmentDescriptor::parse(&default.to_json(0).json), Ok(default));
}

#[test]
fn other_protocols_are_named() {
    for (json, got) in [
        ("{}", ""),
        (r#"{"protocol":"rdma","tcp_data_port":"x"}"#, "rdma"),
        (r#"{"protocol":null}"#, ""),
    ] {
        assert_eq!(parse(json), Err(WireError::Protocol { got: got.to_owned() }), "{json}");
    }
    let long = format!(r#"{{"protocol":"{}"}}"#, "é".repeat(1000));
    let error = parse(&long).unwrap_err().to_string();
    let quote = "é".repeat(40);
    assert_eq!(error, format!("the descriptor's protocol is \"{quote}\", expected \"tcp\""));
}

#[test]
fn unknown_keys_are_tolerated_at_both_levels() {
    let got = parse(
        r#"{"protocol":"tcp","x":{"y":[1,{"z":null}]},"tcp_data_host":"","tcp_proto_version":3,
            "buffers":[{"addr":1,"length":2,"name":"","x":[[]]},{"addr":3.0,"length":4e0}],
            "tensorferry":{"incarnation":"00000000DEADBEEF","ferry":1,"buffers_truncated":true}}"#,
    );
    let buffers = vec![BufferDescriptor { addr: 1, len: 2 }, BufferDescriptor { addr: 3, len: 4 }];
    let ferry =
        FerryKey { version: String::new(), incarnation: 0xdead_beef, buffers_truncated: true };
    let expected = SegmentDescriptor {
        buffers,
        tcp_proto_version: 3,
        tensorferry: Some(ferry),
        ..SegmentDescriptor::default()
    };
    assert_eq!(got, Ok(expected));
}

#[test]
fn addresses_use_all_64_bits() {
    let json = r#"{"protocol":"tcp","buffers":[{"addr":18446744073709551614,"length":1},
        {"addr":9223372036854775808.0,"length":1}]}"#;
    let buffers = parse(json).unwrap().buffers;
    assert_eq!(buffers[0], BufferDescriptor { addr: u64::MAX - 1, len: 1 });
    assert_eq!(buffers[1], BufferDescriptor { addr: 1 << 63, len: 1 });
}

#[test]
fn wrong_shapes_are_refused_by_key() {
    for (rest, what) in [
        (r#""name":[]"#, "name is an array, expected a string"),
        (r#""tcp_data_host":1"#, "tcp_data_host is an integer, expected a string"),
        (r#""tcp_data_port":"1""#, "tcp_data_port is a string, expected an integer from 0"),
        (r#""tcp_data_port":65536"#, "tcp_data_port is 65536, which is too large"),
        (r#""tcp_data_port":-1"#, "tcp_data_port is a negative number, expected an integer from 0"),
        (r#""tcp_data_port":true"#, "tcp_data_port is a boolean, expected an integer from 0"),
        (
            r#""tcp_proto_version":1.5"#,
            "tcp_proto_version is a fraction, expected an integer from 0",
        ),
        (r#""rdma_server_name":{}"#, "rdma_server_name is an object, expected a string"),
        (r#""timestamp":1"#, "timestamp is an integer, expected a string"),
        (r#""buffers":{}"#, "buffers is an object, expected an array"),
        (r#""tensorferry":[]"#, "tensorferry is an array, expected an object"),
        (r#""tensorferry":{}"#, "tensorferry.incarnation is not 16 hexadecimal digits"),
        (
            r#""tensorferry":{"incarnation":"+00000000000beef"}"#,
            "tensorferry.incarnation is not 16 hexadecimal digits",
        ),
        (
            r#""tensorferry":{"incarnation":"000000000000beef","buffers_truncated":1}"#,
            "tensorferry.buffers_truncated is an integer, expected true or false",
        ),
    ] {
        assert_eq!(refusal(&format!(r#"{{"protocol":"tcp",{rest}}}"#)), what);
    }
    assert_eq!(refusal("[]"), "the descriptor is an array, expected an object");
    assert_eq!(refusal(r#"{"protocol":["tcp"]}"#), "protocol is an array, expected a string");
}

#[test]
fn a_bad_buffer_is_refused_by_index() {
    for (second, what) in [
        ("7", "buffers[1] is an integer, expected an object"),
        (r#"{"addr":"x","length":1}"#, "buffers[1].addr is a string, expected an integer from 1"),
        (r#"{"addr":0,"length":1}"#, "buffers[1].addr is 0, expected an integer from 1"),
        (r#"{"length":1}"#, "buffers[1].addr is absent, expected an integer from 1"),
        (r#"{"addr":1,"length":0}"#, "buffers[1].length is 0, expected an integer from 1"),
        (
            r#"{"addr":1,"length":-1}"#,
            "buffers[1].length is a negative number, expected an integer from 1",
        ),
        (
            r#"{"addr":18446744073709551616,"length":1}"#,
            "buffers[1].addr is a number past 64 bits, expected an integer from 1",
        ),
        (
            r#"{"addr":18446744073709551606,"length":100}"#,
            "buffers[1]: 0xfffffffffffffff6 + 100 is past 64 bits",
        ),
        (r#"{"addr":1,"length":1,"name":{}}"#, "buffers[1].name is an object, expected a string"),
    ] {
        let json =
            format!(r#"{{"protocol":"tcp","buffers":[{{"addr":1,"length":1}},{second},false]}}"#);
        assert_eq!(refusal(&json), what);
    }
}

#[test]
fn what_is_no_json_is_refused_as_such() {
    let nested = |open: &str, close: &str| {
        format!(r#"{{"protocol":"tcp","x":{}1{}}}"#, open.repeat(5000), close.repeat(5000))
    };
    for json in [
        String::new(),
        "{".to_owned(),
        r#"{"protocol":"tcp"}x"#.to_owned(),
        r#"{"protocol":"tcp","x":1e999}"#.to_owned(),
        nested("[", "]"),
        nested("{\"a\":", "}"),
        "[".repeat(5000),
    ] {
        assert!(matches!(parse(&json), Err(WireError::Json { .. })), "{json:.40}");
    }
    let error = parse("{]").unwrap_err().to_string();
    assert_eq!(error, "expected JSON: key must be a string at line 1 column 2");
}

#[test]
fn a_long_list_is_cut_to_its_first_buffers() {
    let all = descriptor(20_000);
    let encoded = all.to_json(DEFAULT_SEND_LIMIT);
    let room = DEFAULT_SEND_LIMIT as usize - TYPE_LEN - encoded.json.len();
    assert!(room < 64, "{room} bytes are left, enough for another buffer");
    let got = SegmentDescriptor::parse(&encoded.json).unwrap();
    assert!(got.tensorferry.as_ref().unwrap().buffers_truncated);
    assert_eq!(got.buffers, all.buffers[..encoded.buffers_written]);
}

#[test]
fn a_list_is_cut_only_if_it_must_be() {
    let all = descriptor(50);
    let whole = all.to_json(u64::MAX);
    assert_eq!(whole.buffers_written, 50);
    let needed = (whole.json.len() + TYPE_LEN) as u64;
    assert_eq!(all.to_json(needed), whole);
    let empty = all.to_json(0);
    assert_eq!(empty.buffers_written, 0);
    for limit in 0..needed {
        let cut = all.to_json(limit);
        assert!(cut.json.len() + TYPE_LEN <= (limit as usize).max(empty.json.len() + TYPE_LEN));
        let got = SegmentDescriptor::parse(&cut.json).unwrap();
        assert_eq!(got.buffers, all.buffers[..cut.buffers_written]);
        assert!(got.tensorferry.unwrap().buffers_truncated);
    }
}

#[test]
fn without_the_own_key_a_list_is_cut_in_silence() {
    let all = SegmentDescriptor { tensorferry: None, ..descriptor(50) };
    let cut = all.to_json(1000);
    assert!(cut.buffers_written > 0 && cut.json.len() < 1000);
    assert_eq!(SegmentDescriptor::parse(&cut.json).unwrap().tensorferry, None);
}

#[test]
fn names_are_escaped() {
    let mut odd = descriptor(2);
    odd.name = String::new();
    for c in '\0'..='\u{ff}' {
        write!(odd.name, "{c}🦀\"\\").unwrap();
    }
    odd.tcp_data_host = Some(odd.name.clone());
    let json = odd.to_json(DEFAULT_SEND_LIMIT).json;
    assert_eq!(SegmentDescriptor::parse(&json), Ok(odd));
}
