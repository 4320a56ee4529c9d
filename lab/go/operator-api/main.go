// SPDX-License-Identifier: GPL-3.0-or-later

// Validates an operator's bundle by operator-framework/api, and prints what its validators say as a list in JSON.
// operator-verify of that module ends with 0 whatever it finds, and has four of the validators.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/operator-framework/api/pkg/manifests"
	"github.com/operator-framework/api/pkg/validation"
	validator "github.com/operator-framework/api/pkg/validation/interfaces"
)

// All of the module's but MultipleArchitecturesValidator, which pulls the images by docker.
var validators = map[string]validator.Validator{
	"ClusterServiceVersion":    validation.ClusterServiceVersionValidator,
	"CustomResourceDefinition": validation.CustomResourceDefinitionValidator,
	"Bundle":                   validation.BundleValidator,
	"OperatorHubV2":            validation.OperatorHubV2Validator,
	"StandardCapabilities":     validation.StandardCapabilitiesValidator,
	"StandardCategories":       validation.StandardCategoriesValidator,
	"Object":                   validation.ObjectValidator,
	"AlphaDeprecatedAPIs":      validation.AlphaDeprecatedAPIsValidator,
	"GoodPractices":            validation.GoodPracticesValidator,
	"CommunityOperator":        validation.CommunityOperatorValidator,
}

type finding struct {
	Validator string `json:"validator"`
	Level     string `json:"level"`
	Field     string `json:"field"`
	Detail    string `json:"detail"`
}

// Usage: operator-api BUNDLE KUBERNETES. It ends with 1 where a validator has an error, and with 2 where nothing could
// be validated.
func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: operator-api BUNDLE KUBERNETES")
		os.Exit(2)
	}
	bundle, err := manifests.GetBundleFromDir(os.Args[1])
	if err != nil || bundle == nil || bundle.CSV == nil {
		fmt.Fprintln(os.Stderr, "no bundle in", os.Args[1], err)
		os.Exit(2)
	}
	objects := append(bundle.ObjectsToValidate(), map[string]string{"k8s-version": os.Args[2]})
	found, failed := []finding{}, false
	for name, each := range validators {
		results := each.Validate(objects...)
		if name == "Bundle" && len(results) == 0 {
			fmt.Fprintln(os.Stderr, "no bundle was validated")
			os.Exit(2)
		}
		for _, result := range results {
			for _, one := range append(result.Errors, result.Warnings...) {
				failed = failed || one.Level == "Error"
				found = append(found, finding{name, string(one.Level), one.Field, one.Error()})
			}
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(found); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	if failed {
		os.Exit(1)
	}
}
