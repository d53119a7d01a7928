package node

import (
	"slices"

	"github.com/terminus-kv/terminus/internal/config"
	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk"
)

// hostFeatures are the contract features that an engine makes use of, or knows how to.
var hostFeatures = []string{sdk.FeatureReceiverChecked, sdk.FeatureByteProgress, sdk.FeatureFencePeer, sdk.FeatureStrided, sdk.FeatureLayerRange}

// HostFeatures returns what an engine tells its plugins that it can use, for those who start one as an
// engine would.
func HostFeatures() []string { return slices.Clone(hostFeatures) }

// PluginSpec is what an engine with this configuration starts for the plugin `name`.
func PluginSpec(name string, cfg *config.Config) (pluginhost.Spec, error) { return spec(name, cfg) }
