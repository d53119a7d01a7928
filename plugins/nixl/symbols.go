package nixl

// symbol is a function of the library that this package calls. The table is filled at load, so that a call
// costs one indirect jump and a missing function is found before anything else is done.
type symbol int

const (
	symIsStub symbol = iota
	symCreateAgent
	symDestroyAgent
	symCreateParams
	symDestroyParams
	symCreateBackend
	symCreateOptArgs
	symDestroyOptArgs
	symSkipDescMerge
	symCreateRegList
	symRegListAdd
	symDestroyRegList
	symRegister
	symDeregister
	symCreateXferList
	symXferListAdd
	symXferListClear
	symDestroyXferList
	symLocalMetadata
	symPartialMetadata
	symLoadMetadata
	symInvalidate
	symCreateRequest
	symPost
	symStatus
	symRelease
	symDestroyRequest
	symbols // how many
)

// symbolNames lack their common prefix.
var symbolNames = [symbols]string{
	symIsStub: "is_stub", symCreateAgent: "create_configured_agent", symDestroyAgent: "destroy_agent",
	symCreateParams: "create_params", symDestroyParams: "destroy_params", symCreateBackend: "create_backend",
	symCreateOptArgs: "create_opt_args", symDestroyOptArgs: "destroy_opt_args",
	symSkipDescMerge: "opt_args_set_skip_desc_merge",
	symCreateRegList: "create_reg_dlist", symRegListAdd: "reg_dlist_add_desc", symDestroyRegList: "destroy_reg_dlist",
	symRegister: "register_mem", symDeregister: "deregister_mem",
	symCreateXferList: "create_xfer_dlist", symXferListAdd: "xfer_dlist_add_desc",
	symXferListClear: "xfer_dlist_clear", symDestroyXferList: "destroy_xfer_dlist",
	symLocalMetadata: "get_local_md", symPartialMetadata: "get_local_partial_md",
	symLoadMetadata: "load_remote_md", symInvalidate: "invalidate_remote_md",
	symCreateRequest: "create_xfer_req", symPost: "post_xfer_req", symStatus: "get_xfer_status",
	symRelease: "release_xfer_req", symDestroyRequest: "destroy_xfer_req",
}

const symbolPrefix = "nixl_capi_"

// versionSymbol is exported by the C ABI that follows 1.5: another layout of the agent's configuration, other
// status numbers, another way to give memory back. Called as the old one it would read the port as a thread mode.
const versionSymbol = symbolPrefix + "get_version"

// generations tell the versions of the C ABI apart, newest first: the first whose mark is exported is the library's.
var generations = []struct{ mark, name string }{
	{"opt_args_set_custom_param", "1.5"},
	{"create_configured_agent", "1.0 to 1.4"},
}
